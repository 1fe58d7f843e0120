"""What has to be known of rearranged matrices before they can be written, kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from scgpu_tasks.io.convert.rearrange import load_array, save_array


def file_name(path: str) -> str:
    """Return a file name that stands for one path in a store, and for no other."""
    # Names of layers may hold any character, so no replacement of the slash is safe.
    return hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()


class Prepared:
    """Row borders and transposed bands of matrices, by the path of the matrix.

    Parameters
    ----------
    root
        Folder; nothing is made before something is kept.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, path: str) -> Path:
        """Return the folder of one matrix."""
        return self.root / file_name(path)

    def save(self, path: str, name: str, values: np.ndarray) -> None:
        """Keep an array."""
        save_array(self.folder(path) / f"{name}.npy", values)

    def load(self, path: str, name: str) -> np.ndarray | None:
        """Return an array that was kept, mapped from the disk; None where there is none."""
        file = self.folder(path) / f"{name}.npy"
        return load_array(file) if file.exists() else None

    def bytes_kept(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.root.rglob("*") if file.is_file())
