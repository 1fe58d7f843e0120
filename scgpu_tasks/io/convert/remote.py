"""An object store as the destination: made on a local disk, then uploaded."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c

from scgpu_tasks.errors import CorruptChunkError, OutputError, ParameterError, ScgpuError
from scgpu_tasks.io.convert.work import WorkFolder
from scgpu_tasks.io.manifest import file_crc32c, manifest_path
from scgpu_tasks.io.source import filesystem

_UPLOADS = 8
_ROOT = "zarr.json"


class RemoteFolder(WorkFolder):
    """Work folder on a local disk of a store that goes to a URL.

    No reader takes what is there for a store before its root document is, and that is uploaded
    last. Interrupted during the upload, the same command uploads what is missing.

    Parameters
    ----------
    url
        Where the store goes.
    staging
        Folder for the local copy; it needs room for the whole store. None: the system's folder
        for temporary files.
    verify
        Read every file back and compare its checksum.
    """

    def __init__(self, url: str, staging: Path | None, *, verify: bool) -> None:
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) if staging is None else staging
        super().__init__(folder.resolve() / f"scgpu-{name}.zarr")
        self.url, self._verify = url, verify
        self._fs, self._path = filesystem(url)

    def check(self, src: str, *, overwrite: bool) -> None:
        """Refuse a destination that is there already.

        Raises
        ------
        ParameterError
            It is the source.
        OutputError
            A store is at the URL, and it is not to be overwritten.
        """
        if src == self.url:
            msg = f"the destination is the source itself: {src}"
            raise ParameterError(msg)
        if self._fs.exists(f"{self._path}/{_ROOT}") and not overwrite:
            msg = (
                f"{self.url} exists; choose another name, or allow overwriting it "
                "(overwrite=True, --overwrite)"
            )
            raise OutputError(msg)

    @property
    def target(self) -> str:
        """URL of the finished store."""
        return self.url

    def was_published(self) -> bool:
        """Whether what is at the URL is the local copy, whose root document goes last."""
        manifest = manifest_path(self.store)
        if self._note_of_end() is None or manifest is None:
            return False
        return all(self._is_there(path) for path in (self.store / _ROOT, manifest))

    def _is_whole(self) -> bool:
        return True

    def publish(self, *, overwrite: bool) -> None:
        """Upload the finished store, and remove the local copy.

        An object store cannot swap two folders: with `overwrite` the old store is gone before
        the new one is complete.
        """
        self.check("", overwrite=overwrite)
        files = [path for path in sorted(self.store.rglob("*")) if path.is_file()]
        last = self.store / _ROOT
        try:
            self._remove_old({str(path.relative_to(self.store)) for path in files})
            with ThreadPoolExecutor(_UPLOADS) as pool:
                for _ in pool.map(self._upload, (path for path in files if path != last)):
                    pass
            self._upload(last)
        except ScgpuError:
            raise
        except OSError as error:
            msg = f"cannot write {self.url}: {error}; run the same command again: it goes on"
            raise OutputError(msg) from error
        self.discard()

    def _remove_old(self, wanted: set[str]) -> None:
        """Remove the old root document first, then all files that the new store lacks."""
        if self._fs.exists(f"{self._path}/{_ROOT}"):
            self._fs.rm_file(f"{self._path}/{_ROOT}")
        for path in list(self._listed()):
            if path.removeprefix(self._path.rstrip("/") + "/") not in wanted:
                self._fs.rm_file(path)

    def _listed(self) -> Iterator[str]:
        found: dict[str, Any] = self._fs.find(self._path, detail=True)
        yield from found

    def _upload(self, path: Path) -> None:
        if self._is_there(path):
            return
        target = self._place(path)
        self._fs.pipe_file(target, path.read_bytes())
        if self._verify and not self._same(target, *file_crc32c(path)):
            msg = (
                "what was uploaded is not what is there now; run the same command again: it "
                "uploads what is missing"
            )
            raise CorruptChunkError(
                msg, store=self.url, shard=str(path.relative_to(self.store))
            )

    def _place(self, path: Path) -> str:
        return f"{self._path}/{path.relative_to(self.store)}"

    def _is_there(self, path: Path) -> bool:
        target = self._place(path)
        return bool(self._fs.exists(target)) and self._same(target, *file_crc32c(path))

    def _same(self, target: str, size: int, checksum: str) -> bool:
        if self._fs.info(target)["size"] != size:
            return False
        return f"{google_crc32c.value(self._fs.cat_file(target)):08x}" == checksum
