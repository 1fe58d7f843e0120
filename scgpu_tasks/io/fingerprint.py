"""Tell whether a store's content changed, without reading the chunks.

Metadata documents count by their content, chunk files by name, size and times. A chunk that
is rewritten in place gets a new modification and status-change time even where its size stays
the same and the modification time is put back.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from scgpu_tasks.errors import StoreError
from scgpu_tasks.io.elements import open_files, read_node

_FORM = b"scgpu_tasks fingerprint 1\n"
_DOCUMENTS = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})

Entry = tuple[str, int, bytes]
"""Name in the store, size in bytes, and what the content is known by."""


def store_fingerprint(
    path: str | os.PathLike[str], elements: Sequence[str] = ("X", "obs", "var")
) -> str:
    """Fingerprint of some elements of a store.

    Parameters
    ----------
    path
        A zarr store: a folder, or a zip file of one.
    elements
        Paths of groups or arrays in it. One that does not exist counts as such. Everything
        else in the store, consolidated metadata included, plays no part; the attributes of
        the root do.

    Returns
    -------
    64 hexadecimal digits: SHA-256. A copy of a store has another fingerprint, because its
    files have other times; in a zip file members count by their checksums instead.

    Raises
    ------
    StoreError
        There is no such store, or it changes at this moment.
    FormatError
        It is not a zarr store.
    """
    files = open_files(path)
    root = read_node(files, "")
    attributes = None if root is None else root.attributes
    digest = hashlib.sha256(_FORM)
    digest.update(json.dumps(attributes, sort_keys=True).encode() + b"\n")
    for element in elements:
        digest.update(_scan(files.path, element)[1].encode())
    return digest.hexdigest()


def stored_bytes(path: str | os.PathLike[str], element: str) -> int:
    """Size of all files of an element in bytes, metadata included; 0 where it does not exist.

    Raises
    ------
    StoreError
        There is no such store, or it changes at this moment.
    """
    return scan_element(path, element)[0]


def scan_element(path: str | os.PathLike[str], element: str) -> tuple[int, str]:
    """Return `stored_bytes` and the fingerprint of one element from one look at its files."""
    return _scan(open_files(path).path, element)


def _scan(store: str, element: str) -> tuple[int, str]:
    is_zip = not Path(store).is_dir()
    try:
        entries = sorted(_zip_entries(store, element) if is_zip else _entries(store, element))
    except OSError as error:
        msg = f"the files of {element} in {store} cannot be listed: {error}"
        raise StoreError(msg) from error
    digest = hashlib.sha256(f"{element}\n".encode("utf-8", "surrogateescape"))
    total = 0
    for name, size, known_by in entries:
        total += size
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(b"%d %d %d\n" % (len(encoded), size, len(known_by)))
        digest.update(encoded + known_by)
    return total, digest.hexdigest()


def _entries(store: str, element: str) -> Iterator[Entry]:
    folders = [element]
    if not Path(store, element).is_dir():
        return
    while folders:
        folder = folders.pop()
        with os.scandir(f"{store}/{folder}") as found:
            for entry in found:
                name = f"{folder}/{entry.name}"
                if entry.is_dir():
                    folders.append(name)
                    continue
                stat = entry.stat()
                known_by = b"%d %d" % (stat.st_mtime_ns, stat.st_ctime_ns)
                if entry.name in _DOCUMENTS:
                    known_by = Path(store, name).read_bytes()
                yield name, stat.st_size, known_by


def _zip_entries(store: str, element: str) -> Iterator[Entry]:
    with zipfile.ZipFile(store) as archive:
        for info in archive.infolist():
            if info.filename.startswith(f"{element}/") and not info.is_dir():
                yield info.filename, info.file_size, b"%d" % info.CRC
