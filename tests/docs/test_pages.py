"""Every block of code in the documentation runs as it is printed, or says why it is not run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import anndata as ad
import pytest
import yaml

from scgpu_tasks.__main__ import _parser as command_parser
from scgpu_tasks.datasets import write_synthetic
from scgpu_tasks.job.commandline import parse_qc_pca
from tests.docs.pages import PAGES, ROOT, RUN, SHOWN, Block, blocks

CODE = [block for page in PAGES for block in blocks(page)]
WITH_CODE = sorted({b.page for b in CODE if b.language in RUN and b.not_run is None})

OURS = re.compile(r"flows/\w+\.py|scgpu-tasks ")


def where(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what a reader has: mydata.h5ad, a store, the checkout and its .venv."""
    folder = tmp_path_factory.mktemp("a reader's folder")
    atlas = write_synthetic(
        folder / "atlas.zarr", 3_000, 2_000, nnz_per_cell=400, n_types=4, n_batches=2, seed=7
    )
    ad.read_zarr(atlas).write_h5ad(folder / "mydata.h5ad")
    (folder / "flows").symlink_to(ROOT / "flows")
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="module")
def finished(small: Path) -> Path:
    """A copy of it after the run that README.md begins with."""
    folder = Path(shutil.copytree(small, small.with_name("after a run"), symlinks=True))
    (command,) = [b for b in blocks("README.md") if is_first_run(b)]
    run_shell(command, folder)
    return folder


def is_first_run(block: Block) -> bool:
    return "flows/qc_pca.py --source" in block.code and block.not_run is None


def run_shell(block: Block, folder: Path) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder,
        env=os.environ | {"PATH": programs, "PREFECT_HOME": str(folder / "prefect")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{where(block)}:\n{done.stdout}\n{done.stderr}"


def run_python(block: Block, names: dict[str, Any], folder: Path) -> None:
    code = block.code
    if "runs/NAME" in code:
        (record,) = (p for p in (folder / "runs").iterdir() if p.name != ".work")
        code = code.replace("runs/NAME", f"runs/{record.name}")
    # Blank lines above, so that a traceback points into the page.
    padded = "\n" * (block.line - 1) + code
    exec(compile(padded, str(ROOT / block.page), "exec"), names)


@pytest.fixture
def figures_are_not_shown() -> Iterator[None]:
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.use(before)


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.usefixtures("figures_are_not_shown")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_runs_as_printed(
    page: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = [b for b in blocks(page) if b.language in RUN and b.not_run is None]
    after_a_run = any("runs/NAME" in b.code for b in code)
    begun: Path = request.getfixturevalue("finished" if after_a_run else "small")
    folder = Path(shutil.copytree(begun, tmp_path / "reader", symlinks=True))
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in code:
        if block.language == "python":
            run_python(block, names, folder)
        elif not is_first_run(block):
            run_shell(block, folder)


@pytest.mark.parametrize("block", CODE, ids=where)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in RUN | SHOWN, f"{where(block)}: say which language it is"
    if block.not_run is not None:
        assert len(block.not_run) > 10, f"{where(block)}: no reason is given"


@pytest.mark.parametrize("block", [b for b in CODE if b.language == "yaml"], ids=where)
def test_yaml_that_is_shown_can_be_read(block: Block) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(block.code))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Our own commands in shell blocks, whether they are run or not."""
    for block in CODE:
        if block.language not in ("bash", "sh"):
            continue
        lines = block.code.replace("\\\n", " ").splitlines()
        for line in (text for text in lines if OURS.search(text)):
            words = shlex.split(line, comments=True)
            for at, word in enumerate(words):
                program = Path(word).name
                is_flow = program in ("qc_pca.py", "convert.py") and "/" in word
                if is_flow or (program == "scgpu-tasks" and at == 0):
                    rest = words[at + 1 :]
                    ends = [i for i, w in enumerate(rest) if w in ("&", "&&", "|", ";")]
                    yield program, rest[: min(ends, default=len(rest))]


def parse_convert(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Under the name that worker processes import it by, the file makes no Prefect flow.
    spec = spec_from_file_location("__mp_main__", ROOT / "flows" / "convert.py")
    assert spec is not None
    assert spec.loader is not None
    flow = module_from_spec(spec)
    spec.loader.exec_module(flow)
    monkeypatch.setattr("scgpu_tasks.job.commandline.run_flow", lambda *_: 0)
    assert flow.main(words) == 0


@pytest.mark.parametrize(("program", "words"), [*commands()])
def test_options_in_printed_commands_exist(
    program: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--help" in words:
        return
    if program == "qc_pca.py":
        parse_qc_pca(words)
    elif program == "convert.py":
        parse_convert(words, monkeypatch)
    else:
        command_parser().parse_args(words)
