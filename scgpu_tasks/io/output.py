"""What to say where something cannot be written."""

from __future__ import annotations

import errno
import os

from scgpu_tasks.errors import OutputError


def write_error(error: OSError, path: str | os.PathLike[str]) -> OutputError:
    """Say why something could not be written, and what to do.

    For errors of the system only: one of ours says so itself, and is not to be its own cause.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full; free some space"
    elif error.errno in (errno.EACCES, errno.EPERM):
        why = "permission denied; give yourself the right to write there"
    elif error.errno == errno.EROFS:
        why = "the file system is read-only; make it writable"
    else:
        why = f"{error.strerror or error}; remove the cause"
    msg = f"cannot write {path}: {why}, and run the same command again: it goes on from here"
    return OutputError(msg)
