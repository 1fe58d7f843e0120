"""Selections, extents and batches: the plan of a read, carried out on the host."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu

from scgpu_tasks.io.counters import read_statistics, reset_statistics
from scgpu_tasks.io.layout import ArrayLayout, analyse_array
from scgpu_tasks.io.plan import PAGE, Jobs, cut_batches, find_extents
from scgpu_tasks.io.selection import UnsupportedRequestError, select_pieces
from tests.io.host_executor import HostPipeline
from tests.io.read_cases import (
    draw_case,
    draw_selection,
    expect,
    open_with,
    read,
    same_bytes,
)

P = cpu.buffer_prototype


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_selection_of_any_array_reads_as_written(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    with tempfile.TemporaryDirectory() as folder:
        case = draw_case(draw, Path(folder) / "a")
        array = open_with(case.path, case.order, HostPipeline)
        for _ in range(4):
            kind, selection = draw_selection(draw, case.values.shape)
            got = read(array, kind, selection, P)
            assert same_bytes(got, expect(case.values, kind, selection))


def test_zarrs_own_ways_to_select_agree_with_its_fused_pipeline(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 99, (31, 23, 5)).astype("i4")
    zarr.create_array(tmp_path / "a", data=values, chunks=(4, 5, 2), shards=(12, 10, 4))
    host, plan = zarr.open_array(tmp_path / "a"), open_with(tmp_path / "a", "C", HostPipeline)
    reset_statistics()
    mask = np.random.default_rng(1).random(values.shape) > 0.8
    for take in (
        lambda a: a[...],
        lambda a: a[3, 4, 1],
        lambda a: a[-3:, ::7, 1],
        lambda a: a.oindex[[30, 2, 2], :, 1],
        lambda a: a.oindex[[30, 2, 2], [1, 1], ::2],
        lambda a: a.oindex[np.arange(31) % 3 == 1, 4],
        lambda a: a.oindex[[5]],
        lambda a: a.vindex[[[0, 30], [4, 4]], 2, 3],
        lambda a: a.vindex[mask],
        lambda a: a.blocks[1:, 0],
        lambda a: a[5:5],
    ):
        assert same_bytes(take(plan), np.asarray(take(host)))
    (found,) = read_statistics().values()
    assert not found["host_requests"]


def test_outputs_of_any_strides_are_written_where_they_lie(tmp_path: Path) -> None:
    values = np.random.default_rng(2).random((30, 20))
    zarr.create_array(tmp_path / "a", data=values, chunks=(7, 6), shards=(14, 12))
    array = open_with(tmp_path / "a", "C", HostPipeline)
    big = np.full((60, 60), -1.0)
    for out in (big[::2, ::3], big.T[:30, :20], np.empty((30, 20), order="F")):
        read(array, "basic", (slice(None), slice(None)), P, cpu.NDBuffer(out))
        assert same_bytes(np.ascontiguousarray(out), values)
    assert (big[1::2, 1::3] == -1.0).any()


def layout() -> ArrayLayout:
    options: dict[str, Any] = {"shape": (100,), "chunks": (10,), "shards": (50,), "dtype": "f4"}
    found = analyse_array(zarr.create_array({}, **options).metadata)
    assert isinstance(found, ArrayLayout)
    return found


def test_whole_chunks_are_decoded_in_place_and_the_rest_moved() -> None:
    pieces = select_pieces(layout(), (slice(5, 45),), (slice(0, 40),), (), (40,), (4,))
    assert pieces.chunk.tolist() == [0, 1, 2, 3, 4]
    assert pieces.whole.tolist() == [False, True, True, True, False]
    assert pieces.target.tolist() == [0, 20, 60, 100, 140]
    assert pieces.count[:, 0].tolist() == [5, 10, 10, 10, 5]
    assert pieces.source.tolist() == [20, 0, 0, 0, 0]


def test_the_same_slice_again_goes_where_it_is_wanted_then() -> None:
    def targets(begin: int) -> list[int]:
        out = slice(begin, begin + 40)
        return select_pieces(layout(), (slice(5, 45),), (out,), (), (90,), (4,)).target.tolist()

    first = targets(0)
    assert targets(50) == [t + 200 for t in first]
    assert targets(0) == first


def test_steps_longer_than_a_chunk_skip_chunks() -> None:
    pieces = select_pieces(layout(), (slice(3, 50, 23),), (slice(0, 3),), (), (3,), (4,))
    assert pieces.chunk.tolist() == [0, 2, 4]
    assert not pieces.whole.any()


@pytest.mark.parametrize(
    ("chunk_selection", "out_selection", "out_shape"),
    [
        ((slice(0, 10), slice(0, 1)), (slice(0, 10),), (10,)),
        ((slice(0, 10),), (slice(0, 9),), (10,)),
        ((np.array([50]),), (slice(0, 1),), (1,)),
        ((np.array([-1]),), (slice(0, 1),), (1,)),
        ((slice(0, 10),), (np.arange(5, 15),), (10,)),
        ((50,), (), ()),
        ((slice(9, None, -1),), (slice(0, 10),), (10,)),
    ],
)
def test_selections_that_cannot_be_are_refused_before_anything_is_read(
    chunk_selection: Any, out_selection: Any, out_shape: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedRequestError):
        select_pieces(
            layout(), chunk_selection, out_selection, (), out_shape, (4,) * len(out_shape)
        )


stretches = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 200_000), st.integers(1, 30_000)),
    min_size=1,
    max_size=40,
)


@given(stretches, st.sampled_from([0, 1000, 64 * 1024]))
def test_extents_cover_every_chunk_without_passing_the_end(
    chunks: list[tuple[int, int, int]], gap: int
) -> None:
    chunks.sort()
    file, offset, size = np.array(chunks, dtype=np.int64).T
    n = len(chunks)
    jobs = Jobs(file, np.zeros(n, int), offset, size, np.zeros((n, 7), int), np.ones(n, bool))
    sizes = np.array([max([0, *(o + s for f, o, s in chunks if f == k)]) for k in range(4)])
    found = find_extents(jobs, sizes, max_gap=gap)
    content = [np.random.default_rng(k).integers(0, 256, sizes[k], "u1") for k in range(4)]
    buffer, used = np.zeros(found.nbytes, "u1"), np.zeros(found.nbytes, bool)
    for k, start, length, position in found:
        assert start % PAGE == position % PAGE == 0
        assert start + length <= sizes[k]
        assert not used[position : position + length].any()
        used[position : position + length] = True
        buffer[position : position + length] = content[k][start : start + length]
    for (k, o, s), at in zip(chunks, found.chunk_position, strict=True):
        assert (buffer[at : at + s] == content[k][o : o + s]).all()
    assert len(found.start) <= n


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 60))
def test_a_first_batch_may_be_smaller(n: int, most: int, first: int) -> None:
    batches = cut_batches(n, most, first)
    assert [i for b in batches for i in range(b.start, b.stop)] == list(range(n))
    lengths = [b.stop - b.start for b in batches]
    assert all(1 <= length <= most for length in lengths)
    assert not lengths or lengths[0] == min(first, most, n)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_batches_are_even_and_complete(n: int, most: int) -> None:
    batches = cut_batches(n, most)
    assert [i for b in batches for i in range(b.start, b.stop)] == list(range(n))
    lengths = [b.stop - b.start for b in batches]
    assert all(1 <= length <= most for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1
