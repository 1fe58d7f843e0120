"""Finished stage outputs, kept in folders named by what determines them.

A stage folder is ``WORK/<stage>/<key>``. The key is a digest of the store's fingerprint, the
specs that shape the stage's numbers, the kind of device and the version of our code, so a
folder never has to be looked into to know whether it still applies. Outputs are written to a
folder beside it and renamed when complete; a manifest holds the size and the checksum of every
file, and nothing is handed out that does not match it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from scgpu_tasks.errors import OutputError
from scgpu_tasks.io.output import write_error
from scgpu_tasks.job.owner import has_ended, owner

T = TypeVar("T")

MANIFEST = "manifest.json"
LAYOUT = 2
PART = 64 * 2**20
BUFFER = 2**20
"""Version of the folder layout; part of every key."""

_DRAFT = ".draft-"
_HELD = ".held"
_ATTEMPTS = 20
_PAUSE_S = 0.1
_FOREIGN_DRAFT_AGE_S = 2 * 24 * 3600


@dataclass(frozen=True)
class StageFolder:
    """A finished, verified stage output.

    Parameters
    ----------
    path
        Absolute path of the folder.
    stage
        Name of the stage.
    key
        Digest that names the folder.
    inputs
        What the key was made of, readable.
    summary
        Small JSON-able facts that the stage left.
    """

    path: Path
    stage: str
    key: str
    inputs: dict[str, Any]
    summary: dict[str, Any]


class WorkDir:
    """The folder that holds stage outputs of one or many stores.

    Parameters
    ----------
    root
        Created when missing.

    Raises
    ------
    OutputError
        The folder cannot be made or written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        require_writable(self.root, option="work")

    def find(self, stage: str, key: str) -> StageFolder | None:
        """Hand out a stage's output if it is there and every file matches the manifest.

        Returns
        -------
        The folder, or None where it is missing, incomplete or damaged.
        """
        found = _verified(self.root / stage / key, stage, key)
        if found is not None:
            # When it was last used is what somebody who prunes the folder goes by.
            with contextlib.suppress(OSError):
                os.utime(found.path / MANIFEST)
        return found

    @contextlib.contextmanager
    def hold(self, keys: Iterable[str]) -> Iterator[None]:
        """Keep outputs, those to come included, from being pruned while the block runs."""
        folder = self.root / _HELD
        note = folder / f"{owner()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir(exist_ok=True)
            note.write_text("\n".join(keys))
        except OSError as error:
            note.unlink(missing_ok=True)
            raise write_error(error, folder) from error
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def read(self, stage: str, key: str, reader: Callable[[StageFolder], T]) -> T | None:
        """Find a stage's output and read it, also while a refresh elsewhere replaces it.

        Parameters
        ----------
        reader
            Reads the folder's files.

        Returns
        -------
        What the reader returned, or None where there is no intact output.
        """
        for _ in range(_ATTEMPTS):
            found = self.find(stage, key)
            if found is not None:
                with contextlib.suppress(FileNotFoundError):
                    return reader(found)
            time.sleep(_PAUSE_S)
        return None

    @contextlib.contextmanager
    def draft(self, stage: str) -> Iterator[Draft]:
        """Folder to write a stage's files into; gone at the end unless published.

        Yields
        ------
        A `Draft`; call its ``publish`` when all files are written.
        """
        parent = self.root / stage
        name = f"{_DRAFT}{owner()}-{secrets.token_hex(4)}"
        try:
            (parent / name).mkdir(parents=True)
        except OSError as error:
            raise write_error(error, parent) from error
        draft = Draft(parent / name, stage)
        try:
            yield draft
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)

    def clean(self) -> list[Path]:
        """Remove what killed runs left half written; never what a live run is writing.

        A draft's name holds machine, process and the process's start. On this machine it goes
        when that process has ended; one from elsewhere goes after two days without a change.

        Returns
        -------
        The folders that were removed.
        """
        removed = []
        for path in self.root.glob(f"*/{_DRAFT}*"):
            if _abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        for note in self.root.glob(f"{_HELD}/*"):
            if _abandoned(note):
                note.unlink(missing_ok=True)
        return removed


class Draft:
    """A stage output being written.

    Parameters
    ----------
    path
        Where to put the files.
    stage
        Name of the stage.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.path = path
        self.stage = stage

    def publish(
        self, key: str, *, inputs: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> StageFolder:
        """Write the manifest and give the folder its final name.

        Where another run has published the same key meanwhile, that one stays and this one is
        dropped: both hold the same numbers. A damaged folder under that name is replaced.

        Raises
        ------
        OutputError
            The folder cannot be written or renamed.
        """
        final = self.path.parent / key
        try:
            body = {
                "layout": LAYOUT,
                "stage": self.stage,
                "key": key,
                "created": time.time(),
                "inputs": dict(inputs),
                "summary": dict(summary),
                "files": _describe_files(self.path),
            }
            text = json.dumps({**body, "checksum": _digest(body)}, indent=1)
            (self.path / MANIFEST).write_text(text)
            found = self._give_name(final, StageFolder(final, self.stage, key, *_texts(text)))
        except OSError as error:
            raise write_error(error, final) from error
        if found is None:
            msg = f"{final} is being replaced over and over; see what else writes to it"
            raise OutputError(msg)
        return found

    def _give_name(self, final: Path, mine: StageFolder) -> StageFolder | None:
        for _ in range(_ATTEMPTS):
            try:
                self.path.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                return mine
            theirs = _verified(final, mine.stage, mine.key)
            if theirs is not None:
                return theirs
            _set_aside(final)
        return None

    def replace(
        self, key: str, *, inputs: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> StageFolder:
        """Publish even where an intact output of the same key is there (a refresh)."""
        final = self.path.parent / key
        if final.exists():
            _set_aside(final)
        return self.publish(key, inputs=inputs, summary=summary)


def stage_key(
    stage: str,
    fingerprint: str,
    digests: Iterable[str],
    *,
    code: str,
    device: str = "cpu",
) -> str:
    """Name of a stage folder: 40 hex digits over everything that determines its content.

    Parameters
    ----------
    stage
        Name of the stage.
    fingerprint
        Content fingerprint of the store.
    digests
        Digests of the specs that shape the stage's numbers.
    code
        `code_version` of the stage.
    device
        ``"cpu"`` or ``"gpu"``: equal to a documented tolerance, not to the last bit.
    """
    body = [LAYOUT, stage, fingerprint, list(digests), code, device]
    return _digest(body)[:40]


def require_writable(path: str | os.PathLike[str], *, option: str) -> Path:
    """Make a folder and write a file into it, or say why that does not work.

    Parameters
    ----------
    path
        The folder; parents are created.
    option
        Name of the option that chose it, for the message.

    Raises
    ------
    OutputError
        With the option to change.
    """
    folder = Path(path).absolute()
    if ".." in folder.parts:
        folder = folder.resolve()
    probe = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        msg = f"cannot write to {folder} ({reason}); choose another folder with --{option}"
        raise OutputError(msg) from error
    return folder


def _texts(manifest: str) -> tuple[dict[str, Any], dict[str, Any]]:
    body = json.loads(manifest)
    return body["inputs"], body["summary"]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_checksum(path: Path, pool: ThreadPoolExecutor) -> str:
    """SHA-256 of the SHA-256 of every `PART` of a file, which many threads make at once."""
    starts = range(0, max(path.stat().st_size, 1), PART)
    parts = pool.map(lambda start: _part_checksum(path, start), starts)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _part_checksum(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        digest, left = hashlib.sha256(), PART
        while left and (data := file.read(min(left, BUFFER))):
            digest.update(data)
            left -= len(data)
    return digest.digest()


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    names = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return {
            name: {
                "size": (folder / name).stat().st_size,
                "sha256": _file_checksum(folder / name, pool),
            }
            for name in names
        }


def _verified(folder: Path, stage: str, key: str) -> StageFolder | None:
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        checksum = body.pop("checksum")
        if checksum != _digest(body) or (body["stage"], body["key"]) != (stage, key):
            return None
        if any((folder / n).stat().st_size != f["size"] for n, f in body["files"].items()):
            return None
        now = _describe_files(folder)
        if any(now.get(name) != facts for name, facts in body["files"].items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return StageFolder(folder, stage, key, body["inputs"], body["summary"])


def checksum_of(folder: Path) -> str | None:
    """Checksum of a stage's output, all files included; None where it cannot be told."""
    try:
        checksum: str = json.loads((folder / MANIFEST).read_bytes())["checksum"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return checksum


def held_keys(root: Path) -> set[str]:
    """Keys of the outputs in a folder that runs which go on need."""
    keys: set[str] = set()
    for note in root.glob(f"{_HELD}/*"):
        with contextlib.suppress(FileNotFoundError):
            if not _abandoned(note):
                keys |= set(note.read_text(errors="replace").split())
    return keys


def remove_unheld(folder: Path) -> bool:
    """Remove a stage's output unless a run needs it; tells whether it is gone."""
    work, key = folder.parents[1], folder.name
    aside = None if key in held_keys(work) else _aside(folder)
    if aside is None:
        return False
    if key in held_keys(work):
        # A run came in between. It looks for its outputs more than once.
        with contextlib.suppress(OSError):
            aside.rename(folder)
            return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _set_aside(folder: Path) -> None:
    aside = _aside(folder)
    if aside is not None and aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside is not None:
        # Not ours: a plain file under the name of a folder.
        aside.unlink(missing_ok=True)


def _aside(folder: Path) -> Path | None:
    # Renamed first, so that nobody finds a half-removed folder under its name.
    aside = folder.parent / f"{_DRAFT}{owner()}-{secrets.token_hex(4)}"
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return None
    return aside


def _abandoned(path: Path) -> bool:
    ended = has_ended(path.name.removeprefix(_DRAFT))
    if ended is not None:
        return ended
    try:
        newest = max(p.stat().st_mtime for p in (path, *path.rglob("*")))
    except OSError:
        return False
    return time.time() - newest > _FOREIGN_DRAFT_AGE_S
