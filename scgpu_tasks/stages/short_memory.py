"""What to do where a GPU's memory does not suffice for a block: free some, then cut it."""

from __future__ import annotations

import threading
from collections.abc import Callable

# A block is cut into at most about twice as many parts.
_PARTS = 32
_one_at_a_time = threading.Lock()


def with_less(
    work: Callable[[int, int], None], start: int, stop: int, *, can_cut: bool, n_bytes: int
) -> None:
    """Work on rows again that needed more memory than there was.

    Threads take turns, so that the memory of those that wait is free. What is kept for speed
    only is dropped before.

    Parameters
    ----------
    work
        Works on some rows; where it runs out of memory, it has changed nothing.
    start, stop
        The rows.
    can_cut
        Whether parts of the rows can be worked on.
    n_bytes
        About what the values and column numbers of the rows take.

    Raises
    ------
    MemoryError
        Not even a small part of the rows fits; says what to change.
    """
    with _one_at_a_time:
        least = max(1, (stop - start) // _PARTS)
        todo = [(start, stop)]
        while todo:
            first, last = todo.pop()
            _free()
            try:
                work(first, last)
            except MemoryError as error:
                if can_cut and last - first > least:
                    middle = (first + last) // 2
                    todo += [(middle, last), (first, middle)]
                    continue
                error.add_note(_advice(start, stop, n_bytes))
                raise


def _free() -> None:
    """Free kept blocks, the readers' scratch, and what allocators hold back."""
    import cupy

    from scgpu_tasks.io.scratch import release_memory
    from scgpu_tasks.stages import resident

    resident.drop()
    release_memory()
    cupy.get_default_memory_pool().free_all_blocks()


def _advice(start: int, stop: int, n_bytes: int) -> str:
    return (
        f"the GPU's memory does not suffice for rows {start}:{stop}, of about "
        f"{n_bytes / 2**20:.0f} MiB decoded: read fewer rows at a time (chunks=, or max_bytes= "
        "of open_rows), run fewer threads on each GPU (threads=), choose fewer genes "
        "(n_top_genes=), or let Dask have more of the GPU (gpu_share=)"
    )
