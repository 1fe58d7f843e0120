"""Find the elements of an AnnData zarr store, of any age and zarr format, and what they are.

Metadata documents are read as plain files: nothing here asks zarr's configuration, needs
consolidated metadata, or touches a GPU. zarr itself loads when a store is opened with it, so
that a run which has nothing to read does without.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol

from scgpu_tasks.errors import FormatError, StoreError

if TYPE_CHECKING:
    from zarr.abc.store import Store

V3_DOCUMENTS = ("zarr.json",)
V2_DOCUMENTS = (".zarray", ".zgroup", ".zattrs")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CONVERT = "scgpu-tasks convert"
_DAMAGED = "the metadata is damaged; restore this file from a copy"


class Files(Protocol):
    """The files of a store, by name relative to its root."""

    path: str

    def read(self, name: str) -> bytes | None:
        """Content of a file, or None where there is none."""

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Bytes ``start:start + size`` of a file."""

    def stat(self, name: str) -> tuple[int, int, int] | None:
        """Size, modification time in ns and inode of a file, or None where there is none."""

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted."""

    def zarr_store(self) -> Store:
        """Open it as a read-only zarr store."""


class FolderFiles:
    """A store that is a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Content of a file, or None where there is none."""
        try:
            return Path(self.path, name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            msg = f"cannot read {name} of {self.path}: {error}"
            raise StoreError(msg) from error

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Bytes ``start:start + size`` of a file."""
        with Path(self.path, name).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, start)

    def stat(self, name: str) -> tuple[int, int, int] | None:
        """Size, modification time in ns and inode of a file, or None where there is none."""
        try:
            found = os.stat(f"{self.path}/{name}")  # noqa: PTH116 - thousands of times a second
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size, found.st_mtime_ns, found.st_ino

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted."""
        try:
            with os.scandir(Path(self.path, name)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def zarr_store(self) -> Store:
        """Open it as a read-only zarr store."""
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=True)


class ZipFiles:
    """A store that is one zip file."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        with zipfile.ZipFile(self.path) as archive:
            return {info.filename: info for info in archive.infolist()}

    def read(self, name: str) -> bytes | None:
        """Content of a file, or None where there is none."""
        if name not in self._members:
            return None
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Bytes ``start:start + size`` of a file."""
        with zipfile.ZipFile(self.path) as archive, archive.open(name) as file:
            file.seek(start)
            return file.read(size)

    def stat(self, name: str) -> tuple[int, int, int] | None:
        """Size of a file, time and inode of the archive; None where there is none."""
        if name not in self._members:
            return None
        archive = Path(self.path).stat()
        return self._members[name].file_size, archive.st_mtime_ns, archive.st_ino

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted."""
        prefix = f"{name}/" if name else ""
        inside = (m[len(prefix) :] for m in self._members if m.startswith(prefix))
        return sorted({rest.split("/")[0] for rest in inside if "/" in rest})

    def zarr_store(self) -> Store:
        """Open it as a read-only zarr store."""
        from zarr.storage import ZipStore

        return ZipStore(self.path, read_only=True, mode="r")


@dataclass(frozen=True)
class Node:
    """A group or an array: its own metadata documents, parsed.

    Attributes
    ----------
    name
        Path in the store; empty for the root.
    zarr_format
        2 or 3.
    is_array
        Whether it is an array.
    attributes
        User attributes.
    metadata
        Content of ``zarr.json`` or ``.zarray``.
    documents
        The names of the files that were read.
    """

    name: str
    zarr_format: int
    is_array: bool
    attributes: dict[str, Any]
    metadata: dict[str, Any] = field(repr=False)
    documents: tuple[str, ...] = field(repr=False)

    @property
    def encoding(self) -> str:
        """Anndata's encoding type, its modern name also where an old anndata wrote it."""
        kind = self.attributes.get("encoding-type")
        if kind:
            return str(kind)
        if "h5sparse_format" in self.attributes:
            return f"{self.attributes['h5sparse_format']}_matrix"
        return "array" if self.is_array else ""


def open_files(path: str | os.PathLike[str]) -> Files:
    """Find the store at a path.

    Raises
    ------
    StoreError
        There is nothing, or it cannot be read.
    FormatError
        It is not a zarr store.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        msg = f"{text} is remote: copy it here with `{_CONVERT} {quote(text)} DST`"
        raise FormatError(msg)
    text = str(Path(text.removeprefix("file://")).absolute())
    where = Path(text)
    try:
        if where.is_dir():
            return FolderFiles(text)
        if not where.exists():
            msg = f"{text} does not exist"
            raise StoreError(msg)
        with where.open("rb") as file:
            signature = file.read(8)
        if signature == _HDF5_SIGNATURE or where.suffix in (".h5ad", ".h5"):
            msg = (
                f"{text} is an HDF5 file, not a zarr store: `{_CONVERT} {quote(text)} DST.zarr`"
            )
            raise FormatError(msg)
        if zipfile.is_zipfile(text):
            return ZipFiles(text)
    except PermissionError as error:
        msg = f"{text} cannot be read: {error.strerror}"
        raise StoreError(msg) from error
    msg = f"{text} is a file, not a zarr store; a zarr store is a folder, or a zip file of one"
    raise FormatError(msg)


def read_node(files: Files, name: str) -> Node | None:
    """Read the metadata of a group or array; None where there is no such node.

    Raises
    ------
    FormatError
        A metadata document is damaged.
    """
    prefix = f"{name}/" if name else ""
    document = _read_json(files, prefix + "zarr.json")
    if document is not None:
        kind = document.get("node_type")
        if kind not in ("array", "group"):
            msg = f"{prefix}zarr.json of {files.path} has node_type {kind!r}; {_DAMAGED}"
            raise FormatError(msg)
        attributes = document.get("attributes") or {}
        if not isinstance(attributes, dict):
            msg = f"{prefix}zarr.json of {files.path} has attributes {attributes!r}; {_DAMAGED}"
            raise FormatError(msg)
        return Node(name, 3, kind == "array", attributes, document, (prefix + "zarr.json",))
    for own in (".zarray", ".zgroup"):
        document = _read_json(files, prefix + own)
        if document is not None:
            attributes = _read_json(files, prefix + ".zattrs") or {}
            names = (prefix + own, prefix + ".zattrs")
            return Node(name, 2, own == ".zarray", attributes, document, names)
    return None


def _read_json(files: Files, name: str) -> dict[str, Any] | None:
    raw = files.read(name)
    if raw is None:
        return None
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        msg = f"{name} of {files.path} is not JSON ({error}): {_DAMAGED}"
        raise FormatError(msg) from error
    if not isinstance(document, dict):
        msg = (
            f"{name} of {files.path} holds {type(document).__name__}, not an object; {_DAMAGED}"
        )
        raise FormatError(msg)
    return document


def require_documents(files: Files, name: str = "") -> None:
    """See that zarr can take the metadata of a group, and of all that is in it.

    Raises
    ------
    FormatError
        One document is damaged; it is named, as anndata and zarr do not.
    """
    node = read_node(files, name)
    if node is None:
        return
    import zarr

    store = files.zarr_store()
    try:
        if node.is_array:
            zarr.open_array(store, path=name, mode="r")
        else:
            zarr.open_group(store, path=name, mode="r", use_consolidated=False)
    except Exception as error:
        msg = f"{node.documents[0]} of {files.path} cannot be read ({error}); {_DAMAGED}"
        raise FormatError(msg) from error
    finally:
        store.close()
    if not node.is_array:
        for inside in files.folders(name):
            require_documents(files, f"{name}/{inside}" if name else inside)


def find_matrix(files: Files, layer: str | None) -> Node:
    """Find X, or a layer, and see that it can be read in rows.

    Raises
    ------
    FormatError
        The store is not AnnData; it has no such matrix; or the matrix is not CSR or dense.
    """
    root = read_node(files, "")
    if root is None:
        msg = (
            f"{files.path} is not a zarr store: it has neither zarr.json nor .zgroup in its "
            "top folder; was its writing interrupted?"
        )
        raise FormatError(msg)
    known = root.encoding == "anndata" or all(read_node(files, n) for n in ("obs", "var"))
    if root.is_array or not known:
        what = root.encoding or "a group without encoding-type"
        msg = f"{files.path} is not an AnnData store (it is {what}, without obs and var)"
        raise FormatError(msg)
    name = "X" if layer is None else f"layers/{layer}"
    node = read_node(files, name)
    if node is None or node.encoding == "null":
        layers = [n for n in files.folders("layers") if read_node(files, f"layers/{n}")]
        have = f"its layers are {', '.join(layers)}" if layers else "it has no layers at all"
        msg = f"{files.path} has no {name}; {have}"
        raise FormatError(msg)
    if node.encoding == "csc_matrix":
        msg = (
            f"{name} of {files.path} is CSC (by gene), and cells can only be read from CSR: "
            f"`{_CONVERT} {quote(files.path)} DST --csr`"
        )
        raise FormatError(msg)
    if node.is_array != (node.encoding == "array") or (
        not node.is_array and node.encoding != "csr_matrix"
    ):
        form = f"encoding-type {node.encoding!r}" if node.encoding else "no encoding-type"
        msg = f"{name} of {files.path} has {form}; csr_matrix or array can be read"
        raise FormatError(msg)
    return node


def matrix_shape(files: Files, node: Node) -> tuple[int, int]:
    """Rows and columns that the metadata of a matrix gives.

    Raises
    ------
    FormatError
        It gives none, or not two.
    """
    source = node.metadata if node.is_array else node.attributes
    shape = source.get("shape", source.get("h5sparse_shape"))
    numbers = list(shape) if isinstance(shape, list | tuple) else []
    if len(numbers) != 2 or not all(isinstance(n, int) and n >= 0 for n in numbers):
        msg = f"{node.name} of {files.path} has shape {shape}; rows and columns are needed"
        raise FormatError(msg)
    return numbers[0], numbers[1]
