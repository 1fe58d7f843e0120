"""Damage to the files of an array, of every kind that disks and interrupted writes make."""

from __future__ import annotations

import shutil
from pathlib import Path

import google_crc32c
import numpy as np

from tests.io.read_cases import Draw

KINDS = (
    "bit of a chunk",
    "bit anywhere",
    "bytes of a chunk",
    "cut off",
    "zeros",
    "two chunks swapped in the index",
    "wrong entry with a right checksum",
    "deleted",
    "emptied",
    "two files swapped",
    "longer",
)


def damage(draw: Draw, files: list[Path], n_chunks: int) -> str:
    """Damage one file or two in place; return what was done.

    Parameters
    ----------
    files
        Files of the array, with the index at the end where ``n_chunks`` is not 0.
    n_chunks
        Chunks of a shard; 0 where files have no index.
    """
    kind = KINDS[draw(0, len(KINDS) - 1)]
    path = files[draw(0, len(files) - 1)]
    raw = bytearray(path.read_bytes())
    body = len(raw) - (16 * n_chunks + 4 if n_chunks else 0)
    if kind == "deleted":
        path.unlink()
        return f"{kind}: {path.name}"
    if kind == "emptied":
        raw = bytearray()
    elif kind == "two files swapped" and len(files) > 1:
        other = files[(files.index(path) + 1) % len(files)]
        raw = bytearray(other.read_bytes())
        shutil.copyfile(path, other)
    elif kind == "cut off":
        raw = raw[: draw(0, len(raw) - 1)]
    elif kind == "longer":
        raw += bytes(draw(1, 100))
    elif kind == "zeros":
        at = draw(0, len(raw) - 1)
        n = draw(1, len(raw) - at)
        raw[at : at + n] = bytes(n)
    elif kind in KINDS[5:7] and n_chunks:
        _damage_index(draw, raw, body, n_chunks, swap=kind == KINDS[5])
    else:
        last = len(raw) if kind == "bit anywhere" else max(body, 1)
        for _ in range(1 if kind.startswith("bit ") else draw(2, 20)):
            raw[draw(0, last - 1)] ^= 1 << draw(0, 7)
    path.write_bytes(raw)
    return f"{kind}: {path.name}"


def _damage_index(draw: Draw, raw: bytearray, body: int, n: int, *, swap: bool) -> None:
    index = np.frombuffer(bytes(raw[body:-4]), "<u8").reshape(n, 2).copy()
    if swap:
        i, j = draw(0, n - 1), draw(0, n - 1)
        index[[i, j]] = index[[j, i]]
    else:
        odd = (0, 1, body - 1, body, body + 1, len(raw), 2**31, 2**63, 2**64 - 1)
        index[draw(0, n - 1), draw(0, 1)] = odd[draw(0, len(odd) - 1)]
    inside = index.tobytes()
    raw[body:] = inside + int(google_crc32c.value(inside)).to_bytes(4, "little")
