"""The folder in which a store grows until it is complete: lock, journal, last rename.

``atlas.zarr.converting`` beside ``atlas.zarr`` holds the store, a journal of finished files and
a plan. Whoever finds a folder of the same plan goes on with it; another plan starts anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
import uuid
from pathlib import Path
from typing import Any, Self

from scgpu_tasks.errors import OutputError, ParameterError
from scgpu_tasks.io.convert.audit import verify_store
from scgpu_tasks.io.manifest import file_crc32c, manifest_path

SUFFIX = ".converting"
_REPLACED = "replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class WorkFolder:
    """Everything beside the destination; use it in a ``with`` statement, which holds the lock.

    Parameters
    ----------
    dst
        The finished store's path.
    """

    def __init__(self, dst: Path) -> None:
        self.dst = dst
        self.root = dst.with_name(dst.name + SUFFIX)
        self.store = self.root / "store"
        self.scratch = self.root / "scratch"
        self._journal = self.root / "journal.jsonl"
        self._plan = self.root / "plan.json"
        self._finished = self.root / "finished.json"
        self._lock: int | None = None
        self.notes: list[str] = []

    @property
    def target(self) -> str:
        """Path or URL of the finished store."""
        return str(self.dst)

    def check(self, src: str, *, overwrite: bool) -> None:
        """Refuse a destination that would harm the source or something else.

        Raises
        ------
        ParameterError
            The destination is the source, in it, or around it.
        OutputError
            The destination exists: without `overwrite`, or it is no store.
        """
        check_places(src, self.dst, overwrite=overwrite)

    def __enter__(self) -> Self:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self._put_back()
        except OutputError:
            raise
        except OSError as error:
            self.__exit__()
            # Not empty where there is something to go on with, or somebody else is in it.
            with contextlib.suppress(OSError):
                self.root.rmdir()
            raise self._refusal(error) from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            if not self._has_begun():
                shutil.rmtree(self.root, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _has_begun(self) -> bool:
        """Whether there is anything that the next run can go on with."""
        if not self._plan.exists():
            return False
        kept = (path for path in (self.root / "prepared").rglob("*") if path.is_file())
        return bool(self.journal()) or any(True for _ in kept)

    def _put_back(self) -> None:
        """Return the store that was about to be replaced when an earlier run was killed."""
        old = self.root / _REPLACED
        if old.exists() and not os.path.lexists(self.dst):
            old.rename(self.dst)

    def _refusal(self, error: OSError) -> OutputError:
        if error.errno == errno.EROFS:
            why = "the file system is read-only"
        elif error.errno == errno.ENOSPC:
            why = "the disk is full"
        else:
            why = error.strerror or str(error)
        msg = f"cannot write beside {self.dst}: {why}; choose another destination"
        return OutputError(msg)

    def _acquire(self) -> None:
        """Take the lock; the system drops it when this process ends, however it ends."""
        path = self.root / "lock"
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
                os.close(lock)
                msg = (
                    f"{self.dst} is being written by another converter ({holder or '?'}): "
                    "wait for it, or stop it and run this again"
                )
                raise OutputError(msg) from error
            # The holder may have finished, and removed the folder, between the two calls.
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                break
            os.close(lock)
            self.root.mkdir(parents=True, exist_ok=True)
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def begin(self, plan: dict[str, Any]) -> bool:
        """Go on with what an earlier run of the same plan left, or start anew.

        Returns
        -------
        Whether there is something to go on with.
        """
        previous = self.begun()
        if previous == plan:
            return True
        if previous:
            changed = sorted(
                k for k in plan.keys() | previous if previous.get(k) != plan.get(k)
            )
            self.notes.append(
                "an unfinished conversion was started anew: changed since then: "
                + ", ".join(changed)
            )
        self._clear()
        self.store.mkdir()
        write_json(self._plan, plan)
        return False

    def begun(self) -> dict[str, Any]:
        """Return the plan of an earlier run that was interrupted; empty where there is none."""
        if not self._plan.exists():
            return {}
        try:
            plan = json.loads(self._plan.read_text())
        except ValueError:
            plan = None
        return plan if isinstance(plan, dict) else {"damaged": True}

    def _clear(self) -> None:
        """Remove all but the lock."""
        for path in self.root.iterdir():
            if path.name != "lock":
                remove(path)

    def was_published(self) -> bool:
        """Whether a run that put its store in place was killed before it had tidied up."""
        note = self._note_of_end()
        return note is not None and note["manifest"] == manifest_crc32c(self.dst)

    def finish_earlier(self, plan: dict[str, Any]) -> dict[str, Any] | None:
        """Do what is left to do for a run of the same plan whose store is in place.

        Returns
        -------
        What that run found; None where there is none, or its store was changed since.
        """
        note = self._note_of_end()
        if note is None or not self.was_published():
            return None
        if note["plan"] == plan and self._is_whole():
            self.notes.append(
                "an earlier run had finished this store and was stopped before it removed its "
                "work folder; that was all there was to do"
            )
            self.discard()
            return dict(note["result"])
        # What is there has been used, or is the store that was replaced.
        self._clear()
        return None

    def _is_whole(self) -> bool:
        return not verify_store(self.dst)

    def _note_of_end(self) -> dict[str, Any] | None:
        try:
            note: dict[str, Any] = json.loads(self._finished.read_text())
        except (OSError, ValueError):
            return None
        return note

    def note_end(self, result: dict[str, Any]) -> None:
        """Note that the store is complete, and what a next run is to say if this one dies."""
        plan = json.loads(self._plan.read_text())
        end = {"plan": plan, "manifest": manifest_crc32c(self.store), "result": result}
        write_json(self._finished, end)

    def journal(self) -> list[dict[str, Any]]:
        """Return what was noted so far; a line cut short by a crash is left out."""
        entries = []
        if self._journal.exists():
            for line in self._journal.read_bytes().split(b"\n"):
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                entries.append(entry)
        return entries

    def note(self, entry: dict[str, Any]) -> None:
        """Append one line to the journal."""
        # Begins with a line break too, in case the last line was cut short.
        line = b"\n" + json.dumps(entry).encode() + b"\n"
        with self._journal.open("ab", buffering=0) as file:
            file.write(line)

    def scratch_name(self) -> Path:
        """Return a file name that nobody else uses."""
        self.scratch.mkdir(exist_ok=True)
        return self.scratch / uuid.uuid4().hex

    def publish(self, *, overwrite: bool) -> None:
        """Make the finished store appear at its place, and remove the work folder.

        Raises
        ------
        OutputError
            Something has appeared there meanwhile and is not to be replaced.
        """
        sync_disk(self.store)
        if not self.dst.exists():
            self.store.rename(self.dst)
        elif not overwrite:
            msg = f"{self.dst} appeared during the conversion; remove it, or allow overwriting"
            raise OutputError(msg)
        elif not _exchange(self.store, self.dst):
            self.dst.rename(self.root / _REPLACED)
            self.store.rename(self.dst)
        sync_folder(self.dst.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the work folder."""
        shutil.rmtree(self.root)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(a), os.fsencode(b))
    return renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def clear_finished(dst: Path) -> None:
    """Remove the work folder of a run that was killed after its store was in place."""
    folder = WorkFolder(dst)
    if folder.was_published():
        # Whoever holds the lock is about to do the same.
        with contextlib.suppress(OutputError), folder:
            if folder.was_published():
                folder.discard()


def manifest_crc32c(store: Path) -> str | None:
    """CRC-32C of the manifest of a store, which differs with any file of it."""
    path = manifest_path(store)
    return file_crc32c(path)[1] if path is not None and path.exists() else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a document that is there whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_disk(path: Path) -> None:
    """Have everything on the file system that holds `path` written to the disk."""
    # One call: an fsync for each of a thousand small files takes minutes on a busy disk.
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if syncfs(handle) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Have the names in a folder written to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_places(src: str, dst: Path, *, overwrite: bool) -> None:
    """Refuse destinations that would harm the source or something else.

    Raises
    ------
    ParameterError
        The destination is the source, in it, or around it.
    OutputError
        The destination exists: without `overwrite`, or it is no store.
    """
    source = Path(src)
    if dst == source:
        msg = f"the destination is the source itself: {dst}"
        raise ParameterError(msg)
    if source in dst.parents:
        msg = f"the destination {dst} lies inside the source {src}"
        raise ParameterError(msg)
    if dst in source.parents:
        msg = f"the source {src} lies inside the destination {dst}"
        raise ParameterError(msg)
    if not os.path.lexists(dst):
        return
    if not overwrite:
        msg = (
            f"{dst} exists; choose another name, or allow overwriting it (overwrite=True, "
            "--overwrite)"
        )
        raise OutputError(msg)
    if not any((dst / name).exists() for name in ("zarr.json", ".zgroup", ".zmetadata")):
        msg = (
            f"{dst} exists and is no zarr store; it is not going to be overwritten. Name the "
            f"new store, such as {dst / Path(src).stem}.zarr"
        )
        raise OutputError(msg)
