from __future__ import annotations

import pytest

from scgpu_tasks.records import words


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (words.count, 11_441_407, "11,441,407"),
        (words.count, 0.000123456, "0.000123"),
        (words.count, 1234.56, "1,235"),
        (words.count, None, "–"),
        (words.count, float("nan"), "–"),
        (words.short, 1_500_000, "1.5M"),
        (words.short, 300, "300"),
        (words.size, 0, "0 bytes"),
        (words.size, 999, "999 bytes"),
        (words.size, 13_061_127, "13.1 MB"),
        (words.size, 35e9, "35 GB"),
        (words.duration, 0, "0.0 s"),
        (words.duration, 0.01, "< 0.1 s"),
        (words.duration, 59.6, "1 min 00 s"),
        (words.duration, 200, "3 min 20 s"),
        (words.duration, 7_500, "2 h 05 min"),
        (words.moment, "2026-03-01T08:05:59+01:00", "1 March 2026, 08:05 UTC+01:00"),
        (words.moment, None, "–"),
        (words.moment, "yesterday", "yesterday"),
    ],
)
def test_numbers_read_as_people_write_them(function, value, text) -> None:
    assert function(value) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 10, "0 %"),
        (10, 10, "100 %"),
        (1, 3, "33.3 %"),
        (1, 1_000_000, "< 0.1 %"),
        (999_999, 1_000_000, "> 99.9 %"),
        (1, 0, "–"),
        (None, 10, "–"),
    ],
)
def test_a_share_is_never_rounded_to_all_or_nothing(part, whole, text) -> None:
    assert words.percent(part, whole) == text
