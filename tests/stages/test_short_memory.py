"""Blocks that do not fit a GPU's memory."""

from __future__ import annotations

import pytest

from scgpu_tasks.stages import short_memory


@pytest.fixture(autouse=True)
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No GPU here: counts how often its memory would have been freed."""
    calls: list[int] = []
    monkeypatch.setattr(short_memory, "_free", lambda: calls.append(1))
    return calls


def test_a_block_that_fits_after_memory_was_freed_is_not_cut(freed: list[int]) -> None:
    done: list[tuple[int, int]] = []
    short_memory.with_less(lambda a, b: done.append((a, b)), 10, 90, can_cut=True, n_bytes=100)
    assert done == [(10, 90)]
    assert freed


def test_a_block_is_cut_until_its_parts_fit_and_parts_come_in_order() -> None:
    done: list[tuple[int, int]] = []

    def work(start: int, stop: int) -> None:
        if stop - start > 30:
            raise MemoryError
        done.append((start, stop))

    short_memory.with_less(work, 0, 100, can_cut=True, n_bytes=100)
    assert done == [(0, 25), (25, 50), (50, 75), (75, 100)]


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_block_that_never_fits_says_what_to_change(can_cut: bool) -> None:
    def work(start: int, stop: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        short_memory.with_less(work, 5, 205, can_cut=can_cut, n_bytes=64 << 20)
    (note,) = caught.value.__notes__
    assert "rows 5:205" in note
    assert "64 MiB" in note
    assert "max_bytes=" in note
