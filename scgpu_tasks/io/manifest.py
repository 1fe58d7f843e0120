"""What a converted store says of itself: source, options, and a checksum of every file.

The document lies in the folder of the array of cell names, where neither zarr nor anndata looks
for anything: zarr warns of unknown files anywhere else.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import google_crc32c

_PIECE_BYTES = 2**20
NAME = ".scgpu-manifest.json"
VERSION = 2


def manifest_path(store: str | os.PathLike[str]) -> Path | None:
    """Find the manifest of a converted store.

    Parameters
    ----------
    store
        Folder of the store.

    Returns
    -------
    Where it lies, or would lie; None without cell names.
    """
    obs = Path(store) / "obs"
    attrs = _document(obs).get("attributes")
    if not isinstance(attrs, dict):
        return None
    index = obs / str(attrs.get("_index", "_index"))
    # Strings that may be missing, and categories, are a group of arrays.
    for folder in (index, index / "values", index / "codes"):
        if _document(folder).get("node_type") == "array":
            return folder / NAME
    return None


def _document(folder: Path) -> dict[str, Any]:
    """Read what a node's metadata say; nothing where they cannot be read."""
    try:
        found = json.loads((folder / "zarr.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_manifest(store: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read what a store was made of, and how.

    Parameters
    ----------
    store
        Folder of the store.

    Returns
    -------
    The manifest of a converted store; None where there is none.
    """
    path = manifest_path(store)
    if path is None or not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) else None


def write_manifest(store: Path, content: dict[str, Any]) -> None:
    """Write the manifest into a store whose obs is complete."""
    path = manifest_path(store)
    if path is not None:
        text = json.dumps({"version": VERSION} | content, indent=1)
        path.write_text(text + "\n")


def file_crc32c(path: Path) -> tuple[int, str]:
    """Size of a file and CRC-32C of its bytes, in hex."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(_PIECE_BYTES):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return size, f"{crc:08x}"
