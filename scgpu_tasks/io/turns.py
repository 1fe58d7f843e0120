"""How long a thread of Python may keep the others waiting."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2e-4
"""Where threads call into libraries all the time: Python's own 5 ms would be most of it."""

_lock = threading.Lock()
_users = 0
_before = sys.getswitchinterval()


def shorten() -> None:
    """Let threads of this process take turns more often, until `restore` is called as often."""
    global _users, _before
    with _lock:
        if not _users:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SECONDS))
        _users += 1


def restore() -> None:
    """Undo one `shorten`."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            sys.setswitchinterval(_before)


@contextmanager
def short_turns() -> Iterator[None]:
    """`shorten`, to the end of the block."""
    shorten()
    try:
        yield
    finally:
        restore()
