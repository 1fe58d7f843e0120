"""What to do where memory does not suffice for a block: free some, then cut it."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass

from scgpu_tasks.errors import OutOfMemoryError

# A block is cut into at most about twice as many parts.
_PARTS = 32
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Need:
    """What a block is, for the message where not even a part of it fits.

    Parameters
    ----------
    start, stop
        Its rows.
    nnz
        Stored values.
    n_bytes
        About what these and their column numbers take, decoded.
    on_gpu
        Whose memory ran out.
    """

    start: int
    stop: int
    nnz: int
    n_bytes: int
    on_gpu: bool

    def advice(self, error: BaseException) -> str:
        """Say what did not fit, and what to change."""
        whose, options = (
            (
                "GPU's memory",
                "run fewer threads on each GPU (threads= of start_cluster), choose fewer genes "
                "(n_top_genes=), or let Dask have more of the GPU (gpu_share=)",
            )
            if self.on_gpu
            else (
                "memory",
                "run fewer workers, which have more each (workers=), raise memory_limit=, or "
                "choose fewer genes (n_top_genes=)",
            )
        )
        asked = str(error).strip()
        return (
            f"the {whose} does not suffice for rows {self.start}:{self.stop} of the matrix: "
            f"{self.nnz:,} stored values, about {self.n_bytes / 2**20:,.0f} MiB decoded, and "
            "not even a small part of them fits"
            f"{f' ({asked})' if asked else ''}. Read fewer rows at a time (chunks=, or "
            f"max_bytes= of open_rows), {options}"
        )


def with_less(work: Callable[[int, int], None], need: Need, *, can_cut: bool) -> int:
    """Work on rows again that needed more memory than there was.

    Threads take turns, so that the memory of those that wait is free. What is kept for speed
    only is dropped before.

    Parameters
    ----------
    work
        Works on some rows; where it runs out of memory, it has changed nothing.
    need
        The rows.
    can_cut
        Whether parts of the rows can be worked on.

    Returns
    -------
    In how many parts it was done.

    Raises
    ------
    OutOfMemoryError
        Not even a small part of the rows fits; says what to change.
    """
    start, stop = need.start, need.stop
    parts, too_large = 0, ""
    with _one_at_a_time:
        least = max(1, (stop - start) // _PARTS)
        todo = [(start, stop)]
        while todo and not too_large:
            first, last = todo.pop()
            _free(on_gpu=need.on_gpu)
            try:
                work(first, last)
            except MemoryError as error:
                if can_cut and last - first > least:
                    middle = (first + last) // 2
                    todo += [(middle, last), (first, middle)]
                else:
                    too_large = need.advice(error)
            else:
                parts += 1
    if too_large:
        # Not from the allocator's error: that one may not travel to another process, and its
        # traceback holds on to the block.
        raise OutOfMemoryError(too_large)
    return parts


def _free(*, on_gpu: bool) -> None:
    """Free kept blocks, the readers' scratch, and what allocators hold back."""
    if not on_gpu:
        trim()
        return
    import cupy

    from scgpu_tasks.io.scratch import release_memory
    from scgpu_tasks.stages import resident

    resident.drop()
    release_memory()
    cupy.get_default_memory_pool().free_all_blocks()


def trim() -> None:
    """Collect garbage, and give memory that this process has freed back to the system."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Give memory that this process has freed back to the system; a matter of milliseconds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
