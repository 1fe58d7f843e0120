"""From a selection in one file to the chunks it needs and where their elements go.

zarr hands a codec pipeline, for every file of a request, a selection within that file and
one within the output. Both are turned into :class:`Pieces`: one row for each chunk that is
touched, with the strided or tabulated walk from the decoded chunk to the output. Pure NumPy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scgpu_tasks.io.layout import ArrayLayout

Ints = NDArray[np.int64]


class UnsupportedRequestError(ValueError):
    """A selection of a form that zarr's indexers are not known to make."""


@dataclass(frozen=True)
class AxisSelection:
    """What is taken along one axis of a file, and where it goes.

    ``source`` and ``target`` are (start, step) or index arrays of ``count`` elements;
    ``axis`` is the output's axis, None where the axis is dropped.
    """

    count: int
    source: tuple[int, int] | Ints
    target: tuple[int, int] | Ints
    axis: int | None


@dataclass
class Pieces:
    """Chunks that a request touches, and the walk from each to the output.

    Element ``(i_0, … i_k)`` of piece ``p`` goes from byte
    ``source[p] + Σ walk(a, i_a)`` of the decoded chunk to byte ``target[p] + Σ …`` of the
    output, where along axis ``a`` the walk is ``i_a`` times a stride, or, where
    ``table[p, a] ≥ 0``, entry ``table[p, a] + i_a`` of a table.

    Parameters
    ----------
    chunk
        int64 (n,): number of the chunk in its file's grid, C order.
    source, target
        int64 (n,): first byte in the decoded chunk, in the output.
    count, source_stride, target_stride, table
        int64 (n, axes): elements, strides in bytes, first table entry or −1.
    source_table, target_table
        int64: byte offsets for axes selected by index arrays.
    whole
        bool (n,): the piece is the whole chunk in the chunk's own byte order, so that it can
        be decoded where it belongs.
    """

    chunk: Ints
    source: Ints
    target: Ints
    count: Ints
    source_stride: Ints
    target_stride: Ints
    table: Ints
    source_table: Ints
    target_table: Ints
    whole: NDArray[np.bool_]

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.chunk)


@dataclass(frozen=True)
class _AxisPieces:
    """The pieces of one axis: one entry for each chunk along it."""

    chunk: Ints
    count: Ints
    source: Ints  # bytes
    target: Ints  # bytes
    source_stride: int
    target_stride: int
    table: Ints
    source_table: Ints
    target_table: Ints


def select_pieces(
    layout: ArrayLayout,
    chunk_selection: Any,
    out_selection: Any,
    drop_axes: tuple[int, ...],
    out_shape: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> Pieces:
    """Return the pieces of one file's part of a request.

    Parameters
    ----------
    layout
        Of the array.
    chunk_selection, out_selection, drop_axes
        As zarr hands them to ``CodecPipeline.read``.
    out_shape, out_strides
        Of the whole output; strides in bytes.

    Raises
    ------
    UnsupportedRequestError
        The two selections do not fit each other or the shapes; the caller falls back.
    """
    chunk_sel = chunk_selection if isinstance(chunk_selection, tuple) else (chunk_selection,)
    out_sel = out_selection if isinstance(out_selection, tuple) else (out_selection,)
    if len(chunk_sel) != layout.ndim:
        msg = f"{len(chunk_sel)} selectors for {layout.ndim} axes"
        raise UnsupportedRequestError(msg)
    arrays = [s for s in chunk_sel if isinstance(s, np.ndarray)]
    if len(arrays) > 1 and all(a.ndim == 1 for a in arrays):
        return _points(layout, chunk_sel, out_sel, out_shape, out_strides)
    axes = _axes(layout.file_shape, chunk_sel, out_sel, drop_axes, out_shape)
    if all(isinstance(a.source, tuple) and isinstance(a.target, tuple) for a in axes):
        return _product_of_slices(layout, axes, out_strides)
    return _product(layout, axes, out_strides)


def count_chunks(layout: ArrayLayout, chunk_selection: Any) -> int:
    """Return how many chunks of one file a selection touches at most.

    Parameters
    ----------
    layout
        Of the array.
    chunk_selection
        As zarr hands it to ``CodecPipeline.read``.
    """
    selectors = chunk_selection if isinstance(chunk_selection, tuple) else (chunk_selection,)
    most = 1
    for selector, length, width in zip(
        selectors, layout.file_shape, layout.chunk_shape, strict=False
    ):
        if isinstance(selector, slice):
            start, stop, _ = selector.indices(length)
            most *= max(0, -(-stop // width) - start // width)
        elif isinstance(selector, np.ndarray) and selector.ndim > 0:
            most *= min(selector.size, -(-length // width))
    return most


# Pieces of the slices used last. Whole files are what is read most, and making the pieces of
# one again would take as long as all else that is done for it.
_known: OrderedDict[tuple[Any, ...], Pieces] = OrderedDict()
_MOST_KNOWN, _MOST_PIECES = 32, 8192


def _product_of_slices(
    layout: ArrayLayout, axes: Sequence[AxisSelection], out_strides: tuple[int, ...]
) -> Pieces:
    """`_product` of axes that have no index arrays; it is the same anywhere in the output."""
    at_origin, begin, key = [], 0, list[Any]()
    for axis in axes:
        start, step = axis.target
        begin += 0 if axis.axis is None else int(start) * out_strides[axis.axis]
        at_origin.append(replace(axis, target=(0, step)))
        key.append((axis.count, axis.source, step, axis.axis))
    where = (layout.file_shape, layout.chunk_shape, layout.dtype.itemsize, out_strides, *key)
    # Threads may do this at the same time: at worst one makes pieces that another had.
    pieces = _known.pop(where, None)
    if pieces is None:
        pieces = _product(layout, at_origin, out_strides)
    if len(pieces) <= _MOST_PIECES:
        _known[where] = pieces
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
    return replace(pieces, target=pieces.target + begin)


def _axes(
    file_shape: tuple[int, ...],
    chunk_sel: tuple[Any, ...],
    out_sel: tuple[Any, ...],
    drop_axes: tuple[int, ...],
    out_shape: tuple[int, ...],
) -> list[AxisSelection]:
    """Pair the selectors of the kept axes with those of the output."""
    kept = [
        a
        for a, s in enumerate(chunk_sel)
        if a not in drop_axes and isinstance(s, (slice, np.ndarray))
    ]
    if len(kept) != len(out_sel) or len(kept) != len(out_shape):
        msg = f"{len(kept)} axes selected for an output of {len(out_shape)}"
        raise UnsupportedRequestError(msg)
    out_axis = {a: i for i, a in enumerate(kept)}
    axes = []
    for a, selector in enumerate(chunk_sel):
        count, source = _along(selector, file_shape[a])
        i = out_axis.get(a)
        n_out, target = (1, (0, 0)) if i is None else _along(out_sel[i], out_shape[i])
        if n_out != count:
            msg = f"{count} elements of axis {a} for {n_out} in the output"
            raise UnsupportedRequestError(msg)
        axes.append(AxisSelection(count, source, target, i))
    return axes


def _along(selector: Any, length: int) -> tuple[int, tuple[int, int] | Ints]:
    """Return how many elements a selector takes, and (start, step) or their indices."""
    if isinstance(selector, slice):
        taken = range(*selector.indices(length))
        return len(taken), (taken.start, taken.step)
    if isinstance(selector, np.ndarray) and selector.ndim > 0:
        if selector.dtype.kind == "b":
            selector = np.flatnonzero(selector)
        index = selector.reshape(-1).astype(np.int64, copy=False)
        if index.size and (index.min() < 0 or index.max() >= length):
            msg = f"indices outside 0…{length - 1}"
            raise UnsupportedRequestError(msg)
        return index.size, index
    start = int(selector)
    if not 0 <= start < length:
        msg = f"index {start} outside 0…{length - 1}"
        raise UnsupportedRequestError(msg)
    return 1, (start, 1)


def _product(
    layout: ArrayLayout, axes: Sequence[AxisSelection], out_strides: tuple[int, ...]
) -> Pieces:
    """Cut every axis at the chunk edges, and take all combinations."""
    chunk_strides = _c_strides(layout.chunk_shape, layout.dtype.itemsize)
    cut, n_table = [], 0
    for a, axis in enumerate(axes):
        stride = 0 if axis.axis is None else out_strides[axis.axis]
        piece = _cut(axis, layout.chunk_shape[a], chunk_strides[a], stride, n_table)
        n_table += len(piece.source_table)
        cut.append(piece)
    lengths = tuple(len(c.chunk) for c in cut)
    n = int(np.prod(lengths, dtype=np.int64))
    which = np.unravel_index(np.arange(n), lengths) if cut else ()
    chunk, source, target = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    walk = [np.empty((n, max(len(cut), 1)), np.int64) for _ in range(4)]
    count, source_stride, target_stride, table = walk
    count[:], source_stride[:], target_stride[:], table[:] = 1, 0, 0, -1
    whole = np.ones(n, dtype=bool)
    for a, (c, w) in enumerate(zip(cut, which, strict=True)):
        chunk += c.chunk[w] * _grid_stride(layout.grid, a)
        source += c.source[w]
        target += c.target[w]
        count[:, a], table[:, a] = c.count[w], c.table[w]
        source_stride[:, a], target_stride[:, a] = c.source_stride, c.target_stride
        whole &= (count[:, a] == layout.chunk_shape[a]) & (table[:, a] < 0)
        if layout.chunk_shape[a] > 1:
            whole &= c.source_stride == chunk_strides[a] == c.target_stride
    tables = [[np.empty(0, np.int64)], [np.empty(0, np.int64)]]
    for c in cut:
        tables[0].append(c.source_table)
        tables[1].append(c.target_table)
    return Pieces(
        chunk, source, target, count, source_stride, target_stride, table,
        np.concatenate(tables[0]), np.concatenate(tables[1]), whole,
    )  # fmt: skip


def _cut(
    axis: AxisSelection, chunk_len: int, chunk_stride: int, out_stride: int, n_table: int
) -> _AxisPieces:
    """Cut the selection along one axis at the edges of its chunks."""
    if axis.count == 0:
        none = np.empty(0, np.int64)
        return _AxisPieces(none, none, none, none, 0, 0, none, none, none)
    if isinstance(axis.source, tuple) and isinstance(axis.target, tuple):
        return _cut_slice(axis, chunk_len, chunk_stride, out_stride)
    source, target = _indices(axis.source, axis.count), _indices(axis.target, axis.count)
    owner = source // chunk_len
    if np.any(owner[1:] < owner[:-1]):
        order = np.argsort(owner, kind="stable")
        source, target, owner = source[order], target[order], owner[order]
    first = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
    zeros = np.zeros(len(first), np.int64)
    return _AxisPieces(
        chunk=owner[first],
        count=np.diff(np.append(first, len(owner))),
        source=zeros,
        target=zeros,
        source_stride=0,
        target_stride=0,
        table=first + n_table,
        source_table=(source - owner * chunk_len) * chunk_stride,
        target_table=target * out_stride,
    )


def _cut_slice(
    axis: AxisSelection, chunk_len: int, chunk_stride: int, out_stride: int
) -> _AxisPieces:
    (start, step), (out_start, out_step) = axis.source, axis.target
    last = start + (axis.count - 1) * step
    if step < 1:
        msg = f"a step of {step}"
        raise UnsupportedRequestError(msg)
    chunk = np.arange(start // chunk_len, last // chunk_len + 1, dtype=np.int64)
    # The first element at or after each chunk's first position.
    edges = np.append(chunk, chunk[-1] + 1) * chunk_len
    index = np.clip(-((start - edges) // step), 0, axis.count)
    count = np.diff(index)
    kept = count > 0
    chunk, count, index = chunk[kept], count[kept], index[:-1][kept]
    return _AxisPieces(
        chunk=chunk,
        count=count,
        source=(start + index * step - chunk * chunk_len) * chunk_stride,
        target=(out_start + index * out_step) * out_stride,
        source_stride=step * chunk_stride,
        target_stride=out_step * out_stride,
        table=np.full(len(chunk), -1, np.int64),
        source_table=np.empty(0, np.int64),
        target_table=np.empty(0, np.int64),
    )


def _indices(where: tuple[int, int] | Ints, count: int) -> Ints:
    if isinstance(where, tuple):
        return where[0] + where[1] * np.arange(count, dtype=np.int64)
    return where


def _points(
    layout: ArrayLayout,
    chunk_sel: tuple[Any, ...],
    out_sel: tuple[Any, ...],
    out_shape: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> Pieces:
    """Pieces of a selection by coordinates: one index array for each axis."""
    if len(out_sel) != 1 or len(out_shape) != 1:
        msg = f"coordinates for an output of {len(out_shape)} axes"
        raise UnsupportedRequestError(msg)
    found = [_along(s, n) for s, n in zip(chunk_sel, layout.file_shape, strict=True)]
    n_out, where = _along(out_sel[0], out_shape[0])
    if any(n != n_out for n, _ in found):
        msg = f"coordinate arrays of {[n for n, _ in found]} elements for {n_out}"
        raise UnsupportedRequestError(msg)
    target = _indices(where, n_out) * out_strides[0]
    chunk_strides = _c_strides(layout.chunk_shape, layout.dtype.itemsize)
    source, owner = np.zeros(n_out, np.int64), np.zeros(n_out, np.int64)
    for a, (_, index) in enumerate(found):
        along = _indices(index, n_out)
        owner += along // layout.chunk_shape[a] * _grid_stride(layout.grid, a)
        source += along % layout.chunk_shape[a] * chunk_strides[a]
    order = np.argsort(owner, kind="stable")
    source, target, owner = source[order], target[order], owner[order]
    first = np.flatnonzero(np.concatenate(([n_out > 0], owner[1:] != owner[:-1])))
    n = len(first)
    zeros = np.zeros(n, np.int64)
    return Pieces(
        chunk=owner[first],
        source=zeros,
        target=zeros,
        count=np.diff(np.append(first, n_out))[:, None],
        source_stride=np.zeros((n, 1), np.int64),
        target_stride=np.zeros((n, 1), np.int64),
        table=first[:, None].astype(np.int64),
        source_table=source,
        target_table=target,
        whole=np.zeros(n, dtype=bool),
    )


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _grid_stride(grid: tuple[int, ...], axis: int) -> int:
    return int(np.prod(grid[axis + 1 :], dtype=np.int64))
