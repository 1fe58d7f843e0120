"""Any AnnData source, opened for reading: zarr folder, zip, URL, or h5ad."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, ZipStore

from scgpu_tasks.errors import FormatError, MissingPackageError, ScgpuError, StoreError
from scgpu_tasks.io.arrays import DECODE_ERRORS
from scgpu_tasks.io.elements import open_files, require_documents

Node = h5py.Group | h5py.Dataset | zarr.Group | zarr.Array
_EXTRA_PACKAGES = {
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
_METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zattrs", ".zarray")


@dataclass
class Source:
    """An open source; close it, or use it in a ``with`` statement.

    Attributes
    ----------
    path
        Path or URL, absolute.
    kind
        ``"h5ad"`` or ``"zarr"``.
    form
        What it is in words, such as ``zarr v2 folder``.
    root
        Its root group.
    """

    path: str
    kind: str
    form: str
    root: h5py.Group | zarr.Group
    _closers: tuple[Any, ...] = ()
    _nodes: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether it lies on a file system that the operating system knows."""
        return not is_url(self.path)

    def node(self, path: str) -> Any:
        """Group or array at a path such as ``X/data``; the root for an empty path."""
        if not path:
            return self.root
        # zarr reads the documents of a node each time it is asked for it.
        if path not in self._nodes:
            try:
                self._nodes[path] = self.root[path]
            except KeyError as error:
                msg = (
                    f"{self.path}: {path} cannot be opened ({error}): it is gone, or a link "
                    "that leads nowhere; remove the link, or write the source again"
                )
                raise FormatError(msg) from error
        return self._nodes[path]

    def members(self, path: str) -> list[str]:
        """Names of what is in a group; the root's for an empty path."""
        group = self.node(path)
        if not isinstance(group, zarr.Group):
            return list(group)
        found = dict(group.members())
        prefix = f"{path}/" if path else ""
        self._nodes |= {f"{prefix}{name}": node for name, node in found.items()}
        return list(found)

    def stamp(self) -> str:
        """Hex SHA-256 that changes when the source is changed in any ordinary way."""
        return source_stamp(self.path)

    def close(self) -> None:
        """Release files and connections."""
        for closer in self._closers:
            closer.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, Exception) and not isinstance(error, ScgpuError):
            name_damage(self.path, error)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something that fsspec must open; ``file://`` does not."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the URL unchanged, or the absolute path with links resolved."""
    text = os.fspath(path)
    if is_url(text):
        return text.rstrip("/")
    return str(Path(text.removeprefix("file://")).expanduser().resolve())


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open an AnnData store of any kind, read-only.

    Parameters
    ----------
    path
        A zarr folder (v2 or v3), a zip file that holds one, an h5ad file, or the URL of any of
        them.

    Raises
    ------
    StoreError
        There is nothing, it cannot be read, or it is cut short.
    FormatError
        It is neither HDF5 nor zarr, or it is no AnnData.
    MissingPackageError
        A package that reads such a URL is not installed.
    """
    text = absolute(path)
    source = _open_url(text) if is_url(text) else _open_local(Path(text))
    try:
        complete = "obs" in source.root and "var" in source.root
    except BaseException as error:
        source.__exit__(type(error), error, None)
        raise
    if not complete:
        source.close()
        msg = f"{text} holds no AnnData: it has no obs and var (found {_names(source.root)})"
        raise FormatError(msg)
    return source


def _names(root: Any) -> str:
    names = sorted(root)[:8]
    return ", ".join(names) if names else "an empty group"


def _open_local(path: Path) -> Source:
    if not path.exists():
        msg = f"{path} does not exist"
        raise StoreError(msg)
    try:
        if path.is_dir():
            return _open_zarr(str(path), LocalStore(path, read_only=True), "folder")
        if zipfile.is_zipfile(path):
            return _open_zarr(str(path), ZipStore(path, mode="r"), "zip file")
        with path.open("rb") as file:
            start = file.read(8)
    except PermissionError as error:
        msg = f"{path} cannot be read: permission denied"
        raise StoreError(msg) from error
    if start != b"\x89HDF\r\n\x1a\n" and not h5py.is_hdf5(path):
        msg = f"{path} is neither an h5ad file, nor a zarr folder, nor a zip file"
        raise FormatError(msg)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        msg = (
            f"{path} cannot be opened as HDF5 ({error}); copy it again from where it came from"
        )
        raise StoreError(msg) from error
    return Source(str(path), "h5ad", "h5ad file", file, (file,))


def _open_zarr(path: str, store: Store, what: str) -> Source:
    try:
        root = zarr.open_group(store, mode="r")
    except (FileNotFoundError, KeyError) as error:
        name_damage(path, error)
        msg = f"{path} is not a zarr group: no zarr.json, .zgroup or .zmetadata at its top"
        raise FormatError(msg) from error
    except PermissionError:
        raise
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror or error})"
        raise StoreError(msg) from error
    except (*DECODE_ERRORS, AttributeError) as error:
        name_damage(path, error)
        msg = (
            f"{path} has damaged consolidated metadata, in its zarr.json or .zmetadata "
            f"({error}); run zarr.consolidate_metadata on it, or copy it again from where it "
            "came from"
        )
        raise FormatError(msg) from error
    form = f"zarr v{root.metadata.zarr_format} {what}"
    return Source(path, "zarr", form, root, (store,))


def name_damage(path: str, error: Exception) -> None:
    """Find the metadata document that makes a local zarr store unreadable.

    Raises
    ------
    FormatError
        There is one; `error` says what is wrong, but not in which file.
    """
    if is_url(path) or h5py.is_hdf5(path):
        return
    files = open_files(path)
    try:
        require_documents(files)
    except FormatError as found:
        raise found from error


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Name the source where the system cannot read it: otherwise a write would get the blame.

    Raises
    ------
    StoreError
        In place of any OSError.
    """
    try:
        yield
    except ScgpuError:
        raise
    except OSError as error:
        msg = (
            f"{path}: {what} cannot be read ({error.strerror or error}); see to its "
            "permissions and its disk, and run the same command again: it goes on from here"
        )
        raise StoreError(msg) from error


def filesystem(url: str) -> tuple[Any, str]:
    """Fsspec file system of a URL, and the path in it.

    Raises
    ------
    MissingPackageError
        fsspec, or the package for this kind of URL, is not installed.
    """
    protocol = url.split("://", 1)[0]
    package = _EXTRA_PACKAGES.get(protocol, protocol)
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        msg = f"reading {protocol}:// URLs needs a package: pip install fsspec {package}"
        raise MissingPackageError(msg) from error
    except ValueError as error:
        msg = f"{url}: {error}"
        raise StoreError(msg) from error
    return fs, path


def fsspec_store(url: str, *, read_only: bool) -> FsspecStore:
    """Zarr store over any fsspec file system."""
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    fs, path = filesystem(url)
    if not fs.async_impl:
        return FsspecStore(
            AsyncFileSystemWrapper(fs, asynchronous=True), path=path, read_only=read_only
        )
    try:
        return FsspecStore.from_url(url, read_only=read_only)
    except ImportError as error:
        package = _EXTRA_PACKAGES.get(url.split("://", 1)[0], "fsspec")
        msg = f"{url} needs a package: pip install {package}"
        raise MissingPackageError(msg) from error


def _open_url(url: str) -> Source:
    if url.lower().endswith((".h5ad", ".h5", ".hdf5")):
        fs, path = filesystem(url)
        try:
            handle = fs.open(path, "rb")
            file = h5py.File(handle, "r")
        except OSError as error:
            msg = f"{url} cannot be opened as HDF5: {error}"
            raise StoreError(msg) from error
        return Source(url, "h5ad", "h5ad file (remote)", file, (file, handle))
    if url.lower().endswith(".zip"):
        msg = f"{url}: a zip file must be copied to a local disk first"
        raise FormatError(msg)
    source = _open_zarr(url, fsspec_store(url, read_only=True), "folder (remote)")
    if url.startswith("http") and source.root.metadata.consolidated_metadata is None:
        msg = (
            f"{url} has no consolidated metadata, and nothing over http can be listed: run "
            "zarr.consolidate_metadata where it is stored"
        )
        raise FormatError(msg)
    return source


def source_stamp(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 over the names, sizes and times of all files, and over zarr metadata.

    Of a remote source, what the server says of it (ETag, size, time); of a zarr store over
    http, its metadata documents only.
    """
    text = absolute(path)
    digest = hashlib.sha256()
    for item in _url_files(text) if is_url(text) else _local_files(Path(text)):
        digest.update(json.dumps(item).encode())
    return digest.hexdigest()


def _local_files(path: Path) -> Iterator[Any]:
    if not path.is_dir():
        stat = path.stat()
        yield [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        return
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(path / below) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = below + entry.name
            if entry.is_dir():
                pending.append(f"{name}/")
                continue
            stat = entry.stat()
            # The modification time can be put back, the status-change time cannot.
            item: list[Any] = [name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
            if entry.name in _METADATA:
                item.append(hashlib.sha256((path / name).read_bytes()).hexdigest())
            yield item


def _url_files(url: str) -> Iterator[Any]:
    fs, path = filesystem(url)
    if url.lower().endswith((".h5ad", ".h5", ".hdf5")):
        yield fs.ukey(path)
    elif url.startswith("http"):
        for name in ("zarr.json", ".zmetadata"):
            if fs.exists(f"{path}/{name}"):
                yield [name, hashlib.sha256(fs.cat_file(f"{path}/{name}")).hexdigest()]
    else:
        for name, info in sorted(fs.find(path, detail=True).items()):
            mark = [
                str(info.get(k)) for k in ("ETag", "etag", "mtime", "LastModified", "created")
            ]
            yield [name, info.get("size"), mark]


def plain_attrs(node: Any) -> dict[str, Any]:
    """Attributes of a group or an array as JSON values, in stored order."""
    for name, value in node.attrs.items():
        if isinstance(value, h5py.Reference):
            msg = (
                f"{node.file.filename}: attribute {name} of {node.name} is a reference, which "
                "zarr cannot hold; remove it from the source"
            )
            raise FormatError(msg)
    return {str(name): _plain(node.attrs[name]) for name in node.attrs}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, h5py.Empty):
        return None
    return value


def encoding(node: Any) -> str:
    """Anndata's name for the form of an element, also of those written before it had one."""
    attrs = node.attrs
    name = attrs.get("encoding-type", "")
    if not name and "h5sparse_format" in attrs:
        name = f"{_plain(attrs['h5sparse_format'])}_matrix"
    return str(_plain(name))
