"""Files of a record that appear in one step, also as copies of files that are there already."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_one_step(path: Path) -> Iterator[Path]:
    """Give a path beside the final one; what lies there at the end gets the final name."""
    partial = path.with_name(f".{path.name}.partial")
    _remove(partial)
    try:
        yield partial
        if partial.is_dir():
            _remove(path)
        partial.replace(path)
    except BaseException:
        _remove(partial)
        raise


def copy(made: Path, path: Path) -> bool:
    """Copy a file or folder; no link, so that damage to one spares the other.

    Parameters
    ----------
    made
        The file or folder.
    path
        The copy; replaced if there.

    Returns
    -------
    Whether the file or folder was there to be copied.
    """
    try:
        with in_one_step(path) as partial:
            _copy(made, partial)
    except FileNotFoundError:
        return False
    return True


def _copy(made: Path, path: Path) -> None:
    if not made.is_dir():
        shutil.copyfile(made, path)
        return
    path.mkdir()
    for inside in made.iterdir():
        _copy(inside, path / inside.name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
