"""What a kernel does to a stored value before it adds it up."""

from __future__ import annotations

from enum import IntEnum


class Transform(IntEnum):
    """Value x of a cell with factor s."""

    IDENTITY = 0
    """x; the factor plays no part."""
    SCALE = 1
    """x * s: normalised counts."""
    LOG1P = 2
    """log(1 + x * s): log-normalised counts."""
    EXPM1 = 3
    """exp(x) - 1: normalised counts again, from log-normalised ones."""
