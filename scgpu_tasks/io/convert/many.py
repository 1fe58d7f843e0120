"""Several sources into one folder: which go where, and which are new or changed."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import ParameterError, StoreError
from scgpu_tasks.io.convert.convert import ConvertResult, convert_zarr, is_current
from scgpu_tasks.io.convert.device import Device
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.convert.progress import Progress
from scgpu_tasks.io.convert.work import SUFFIX, clear_finished
from scgpu_tasks.io.manifest import read_manifest
from scgpu_tasks.io.source import absolute, is_url

_SUFFIXES = (".h5ad", ".zarr", ".zip")
_MARKS = ("zarr.json", ".zgroup", ".zmetadata")


def match_sources(src: str, dst: str) -> list[tuple[str, str]]:
    """Pairs of source and destination.

    Parameters
    ----------
    src
        One source; or a folder of sources, or a pattern such as ``/data/*.h5ad``.
    dst
        The store for one source; the folder of the stores for several, where each store gets
        its source's name.

    Raises
    ------
    StoreError
        Nothing matches.
    ParameterError
        Two sources would become one store.
    """
    if is_url(src):
        return [(src, dst)]
    path = Path(absolute(src))
    if path.is_file() or _is_store(path):
        return [(str(path), dst)]
    found = path.iterdir() if path.is_dir() else map(Path, glob.glob(src, recursive=True))  # noqa: PTH207
    sources = sorted(p for p in found if _is_source(p))
    if not sources:
        msg = f"{src} is no source, and no source matches it (h5ad, zarr folder, zip)"
        raise StoreError(msg)
    pairs: dict[str, str] = {}
    for source in sources:
        target = str(Path(dst) / f"{source.name.removesuffix(source.suffix)}.zarr")
        if target in pairs:
            msg = f"{pairs[target]} and {source} would both become {target}; rename one"
            raise ParameterError(msg)
        pairs[target] = str(source)
    return [(source, target) for target, source in pairs.items()]


def _is_store(path: Path) -> bool:
    return any((path / mark).exists() for mark in _MARKS)


def _is_source(path: Path) -> bool:
    if path.name.startswith(".") or path.name.endswith(SUFFIX):
        return False
    return _is_store(path) if path.is_dir() else path.suffix in _SUFFIXES


def convert_if_changed(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    spec: ConvertSpec | None = None,
    overwrite: bool = False,
    verify: bool = True,
    workers: int | None = None,
    device: Device = "auto",
    staging: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ConvertResult | None:
    """Convert a source that has no store yet, or has changed since its store was made.

    A store that this made from the same source, and that nobody changed since, is replaced
    where the source or the options have changed; any other store only with `overwrite`.
    Parameters and errors are those of `convert_zarr`.

    Returns
    -------
    None where the store is current already.
    """
    if not overwrite and is_current(src, dst, spec):
        if not is_url(absolute(dst)):
            clear_finished(Path(absolute(dst)))
        return None
    there = read_manifest(absolute(dst)) is not None
    result = convert_zarr(
        src,
        dst,
        spec=spec,
        overwrite=overwrite or "untouched",
        verify=verify,
        workers=workers,
        device=device,
        staging=None if staging is None else Path(staging),
        progress=progress,
    )
    if there and not overwrite:
        note = (
            "replaced the store made of an earlier state of the source, or with other options"
        )
        result = replace(result, notes=(note, *result.notes))
    return result


def summary(results: list[dict[str, Any]]) -> str:
    """One line for each source: what became of it."""
    lines = []
    for found in results:
        line = f"{found['state']:9}  {found['source']} -> {found['store']}"
        if found["state"] == "converted":
            size, rate = found["stored_bytes"] / 1e6, found["decoded_bytes"] / found["seconds"]
            line += f"  ({size:,.0f} MB in {found['seconds']:,.0f} s, {rate / 1e6:,.0f} MB/s"
            line += ", verified)" if found["verified"] else ", NOT verified)"
        elif found["state"] == "failed":
            line += f"\n           {found['error']}"
        lines.append(line)
        lines += [f"           note: {note}" for note in found.get("notes", ())]
    return "\n".join(lines)
