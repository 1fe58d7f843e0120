"""Blocks that do not fit into memory."""

from __future__ import annotations

import pickle

import pytest

from scgpu_tasks.errors import OutOfMemoryError
from scgpu_tasks.stages.short_memory import Need, with_less


def need(start: int, stop: int, *, on_gpu: bool = False) -> Need:
    return Need(start, stop, 8_000_000, 64 << 20, on_gpu)


def test_a_block_that_fits_after_memory_was_freed_is_not_cut() -> None:
    done: list[tuple[int, int]] = []
    assert with_less(lambda a, b: done.append((a, b)), need(10, 90), can_cut=True) == 1
    assert done == [(10, 90)]


def test_a_block_is_cut_until_its_parts_fit_and_parts_come_in_order() -> None:
    done: list[tuple[int, int]] = []

    def work(start: int, stop: int) -> None:
        if stop - start > 30:
            raise MemoryError
        done.append((start, stop))

    assert with_less(work, need(0, 100), can_cut=True) == 4
    assert done == [(0, 25), (25, 50), (50, 75), (75, 100)]


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_block_that_never_fits_names_its_rows_values_and_need_and_the_options(
    can_cut: bool,
) -> None:
    sizes = []

    def work(start: int, stop: int) -> None:
        sizes.append(stop - start)
        msg = "cannot allocate 77 bytes"
        raise MemoryError(msg)

    with pytest.raises(OutOfMemoryError) as caught:
        with_less(work, need(5, 205), can_cut=can_cut)
    assert (min(sizes) <= 200 // 32) == can_cut
    message = str(pickle.loads(pickle.dumps(caught.value)))
    for part in ("rows 5:205", "8,000,000 stored values", "64 MiB", "77 bytes", "max_bytes="):
        assert part in message
    assert "workers=" in message


def test_the_advice_for_a_gpu_is_about_the_gpu() -> None:
    advice = need(0, 9, on_gpu=True).advice(MemoryError())
    assert "GPU's memory" in advice
    assert "gpu_share=" in advice
    assert "()" not in advice.replace("start_cluster", "")
