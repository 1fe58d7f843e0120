"""Where a stage's time goes: one line in the log, at level DEBUG, for each of its steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def timed(step: str) -> Iterator[None]:
    """Log the seconds that the body takes."""
    started = time.perf_counter()
    try:
        yield
    finally:
        logger.debug("%s: %.3f s", step, time.perf_counter() - started)


class Watch:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        """Add the time since the last call."""
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._last
        self._last = now

    def add(self, seconds: dict[str, float]) -> None:
        """Add what another watch took."""
        for what, value in seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + value

    def __str__(self) -> str:
        return ", ".join(f"{what} {value:.3f} s" for what, value in self.seconds.items())
