"""How many Gram matrices fit into memory: with many genes, fewer tasks run at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.stages import resident
from scgpu_tasks.stages.host_memory import free_memory

if TYPE_CHECKING:
    from scgpu_tasks.stages.engine import Engine

# Below this many genes a Gram matrix is at most 128 MiB, and nobody needs to count.
_FEW_GENES = 4096
# Matrices of one task: its sums, a copy on its way; and of the end: their total, the total in
# the order of the genes, and what the solver works in.
_OF_A_TASK, _AT_THE_END = 2, 3
# On a GPU: sums over all blocks and over one; and in the solver, with its vectors.
_OF_A_GPU_TASK, _IN_GPU_SOLVER = 2, 4
# Tiles and products of a GPU task; see kernels/_gpu/gram.py.
_TILES = 1 << 30
# The rest is for blocks that are read, and for others.
_SHARE, _GPU_SHARE = 0.9, 0.5


def tasks_at_once(engine: Engine, n_genes: int) -> int | None:
    """How many tasks may make a Gram matrix at the same time.

    Parameters
    ----------
    engine
        Runs the tasks; started.
    n_genes
        Columns of the Gram matrix.

    Returns
    -------
    None where it makes no difference.

    Raises
    ------
    ParameterError
        Not even one fits.
    """
    if n_genes < _FEW_GENES:
        return None
    one = 8 * n_genes**2
    free = int(_SHARE * min(engine.everywhere(free_memory).values()))
    most = (free - _AT_THE_END * one) // (_OF_A_TASK * one)
    if most < 1:
        raise _too_many(n_genes, "", (_OF_A_TASK + _AT_THE_END) * one, free)
    if engine.on_gpu:
        free = int(_GPU_SHARE * min(engine.everywhere(resident.gpu_bytes).values()))
        task, end = _OF_A_GPU_TASK * one + _TILES, _IN_GPU_SOLVER * one
        if free < max(task, end):
            raise _too_many(n_genes, "GPU ", max(task, end), free)
        most = min(most, free // task)
    return most


def _too_many(n_genes: int, kind: str, needed: int, free: int) -> ParameterError:
    return ParameterError(
        f"the Gram matrix of {n_genes:,} genes needs {needed / 2**30:.1f} GiB of "
        f"{kind}memory, and {free / 2**30:.1f} GiB can be had: choose fewer genes with "
        "n_top_genes or mask_var"
    )
