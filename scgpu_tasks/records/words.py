"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from datetime import datetime

_BYTES = ("bytes", "kB", "MB", "GB", "TB", "PB")


def count(value: float | None) -> str:
    """Whole numbers with separators; others with three figures."""
    if value is None or not math.isfinite(value):
        return "–"
    if float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def short(value: float, _position: object = None) -> str:
    """Tick labels: 500, 2k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def percent(part: float | None, whole: float | None = 1.0) -> str:
    """Part of a whole in per cent, one decimal; a dash where there is no whole."""
    if part is None or not whole:
        return "–"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    if 99.9 < share < 100:
        return "> 99.9 %"
    return f"{share:.1f} %".replace(".0 %", " %") if share in (0, 100) else f"{share:.1f} %"


def size(value: float | None) -> str:
    """Bytes with a decimal unit."""
    if value is None:
        return "–"
    step = 0
    while abs(value) >= 1000 and step < len(_BYTES) - 1:
        value /= 1000
        step += 1
    return f"{value:.0f} {_BYTES[step]}" if step == 0 else f"{value:.3g} {_BYTES[step]}"


def duration(seconds: float | None) -> str:
    """Seconds as 0.8 s, 42 s, 3 min 20 s, 2 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds >= 0.05 or seconds == 0 else "< 0.1 s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def moment(text: str | None) -> str:
    """Date and time of an ISO 8601 string, to the minute, with its zone."""
    if not text:
        return "–"
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = when.tzname() or ""
    return f"{when:%d %B %Y, %H:%M} {zone}".strip().lstrip("0")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Set rows of text in columns, those in ``right`` to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
