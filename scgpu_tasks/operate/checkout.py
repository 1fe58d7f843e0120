"""Where the flows are: the step with which a deployed run begins.

A deployment names its flow by a path in the repository, ``flows/qc_pca.py``. The worker finds
the repository itself, so nothing of the machine that deploys stands in the deployment.
"""

from __future__ import annotations

import os
from pathlib import Path

import scgpu_tasks

CHECKOUT = "SCGPU_CHECKOUT"
"""Variable that names the repository's folder, where the package is not installed from it."""

_FLOW = Path("flows") / "qc_pca.py"


def enter_checkout() -> dict[str, str]:
    """Make the repository's folder the working directory of a run.

    It is the one that the package was installed from with ``pip install --editable``, as
    `make` does, or the one that ``SCGPU_CHECKOUT`` names.

    Returns
    -------
    ``directory``, as Prefect's pull steps return it.

    Raises
    ------
    FileNotFoundError
        There are no flows in that folder.
    """
    named = os.environ.get(CHECKOUT)
    folder = Path(named) if named else Path(scgpu_tasks.__file__).parents[1]
    if not (folder / _FLOW).is_file():
        msg = (
            f"no {_FLOW} in {folder}: the worker does not find the repository. Set {CHECKOUT} "
            "to its folder in the worker's environment, or install the package there with "
            "`pip install --editable`"
        )
        raise FileNotFoundError(msg)
    folder = folder.resolve()
    os.chdir(folder)
    return {"directory": str(folder)}
