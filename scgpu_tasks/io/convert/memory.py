"""How many threads may work at once, so that they stay within a fixed amount of memory."""

from __future__ import annotations

from math import prod

from scgpu_tasks.io.convert import rearrange, transpose
from scgpu_tasks.io.convert.encode import PIECE_BYTES
from scgpu_tasks.io.convert.plan import ArrayItem
from scgpu_tasks.io.convert.values import Values

# Of all threads. Python, its packages and the file table of a large source take 0.3 GB more.
BUDGET = 500_000_000
# The allocator keeps some of what threads give back: seen with 16 and 48 threads.
_ALLOCATOR = 1.5


def threads_within(values: Values, method: str, threads: int, budget: int = BUDGET) -> int:
    """Return the largest number of threads, at most `threads`, that fits; at least one.

    Parameters
    ----------
    values
        What is read.
    method
        Of `Worker`: what the threads do.
    """
    if method in ("make_run", "make_band"):
        each = transpose.RUN * max(
            (_entry_bytes(values, m.source) for m in values.plan.sparse if m.transpose),
            default=0,
        )
    else:
        each = max((_array_bytes(values, item) for item in values.plan.arrays), default=0)
    return max(1, min(threads, int(budget / max(1.0, _ALLOCATOR * each))))


def _entry_bytes(values: Values, matrix: str) -> int:
    """Of an entry while it is sorted: the record, its place, and copies of its parts."""
    return 38 + 3 * values.reader(f"{matrix}/data").dtype.itemsize


def _array_bytes(values: Values, item: ArrayItem) -> int:
    """Bytes that a thread holds while it writes one array, or compares it."""
    layout, reader = item.layout, values.reader(item.source)
    chunk = prod(layout.chunk[:1] + layout.shape[1:]) * layout.itemsize
    piece = max(PIECE_BYTES, chunk)
    if item.kind != "copy":
        return 4 * piece + 32 * rearrange.BLOCK
    # As it is in the source; as it is to be; in the store; encoded, twice.
    read = piece * reader.dtype.itemsize // layout.itemsize
    band = reader.whole_bytes if reader.spills else 2 * reader.band_bytes
    return read + 3 * piece + band
