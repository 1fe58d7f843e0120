"""Say how fast a store can be read, what keeps it from being read faster, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import h5py
import numpy as np
import zarr
from zarr.storage import LocalStore

from scgpu_tasks.io.convert.layout import CHUNK_BYTES, index_dtype
from scgpu_tasks.io.convert.plan import SPARSE
from scgpu_tasks.io.layout import ArrayLayout, Refusal, analyse_array, refuse_store
from scgpu_tasks.io.machine import Machine, inspect_machine
from scgpu_tasks.io.presence import lost_files, lost_names, missing_files, names_array
from scgpu_tasks.io.source import encoding, open_source

_MATRICES = ("X", "raw", "layers", "obsm", "varm", "obsp", "varp")
_CONVERT = "convert the store with scgpu-tasks convert"
# Smaller arrays are read in no time however they are stored.
_SMALL = 4 * 1024 * 1024
_FEW_FILES = 256
_FEW_PLACES = 1024
_RESTORE = "write the store again from its source, or restore them from a copy"
_CHUNKS = (64 * 1024, 2 * 1024 * 1024)


@dataclass(frozen=True)
class Finding:
    """Something that costs time when this store is read, or prevents it.

    Attributes
    ----------
    where
        Array or element, such as ``X/data``; empty for the store as a whole.
    what, remedy
        What was found, and what to do about it.
    slow
        Whether it keeps the store from being read at full speed; else it is advice.
    refused
        Whether blocks of cells cannot be read at all.
    """

    where: str
    what: str
    remedy: str
    slow: bool = True
    refused: bool = False

    def __str__(self) -> str:
        """Place, finding and remedy in one line."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}; {self.remedy}"

    @property
    def weight(self) -> str:
        """What it means for reading, in a word."""
        return "refused" if self.refused else "slow" if self.slow else "advice"


@dataclass(frozen=True)
class ArrayReport:
    """How one array is stored.

    Attributes
    ----------
    path, dtype, shape
        Which array.
    codec
        Compression in words, such as ``zstd``.
    chunk_bytes
        Decoded bytes of a chunk; 0 where the array is stored in one piece.
    chunks, files
        How many chunks, and in how many files of the store.
    gpu
        Whether a GPU can decode it.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    chunk_bytes: int
    chunks: int
    files: int
    gpu: bool


@dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Attributes
    ----------
    path, form
        The store, and what it is in words, such as ``zarr v3 folder``.
    shape
        Cells and genes.
    arrays
        Every array of every matrix.
    findings
        What costs time; empty for a store in the best form.
    machine
        Versions, GPUs, and how files reach GPU memory here.
    """

    path: str
    form: str
    shape: tuple[int, int]
    arrays: tuple[ArrayReport, ...]
    findings: tuple[Finding, ...]
    machine: Machine

    @property
    def ok(self) -> bool:
        """Whether nothing keeps the store from being read at full speed."""
        return not any(finding.slow for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """All fields and `ok`, JSON-serialisable."""
        content = asdict(self)
        for array in content["arrays"]:
            array["shape"] = list(array["shape"])
        lists = {name: list(content[name]) for name in ("shape", "arrays", "findings")}
        return content | lists | {"ok": self.ok}

    def __str__(self) -> str:
        """Return the report as text of a few dozen lines."""
        lines = [
            f"{self.path}",
            f"  {self.form}, {self.shape[0]:,} cells, {self.shape[1]:,} genes",
            "",
            *(f"  {line}" for line in self._table()),
            "",
        ]
        if not self.findings:
            lines.append("  GPU-ready: nothing to improve")
        lines += [f"  {f.weight:7}  {f}" for f in self.findings]
        return "\n".join([*lines, "", *(f"  {line}" for line in self.machine.lines())])

    def _table(self) -> Iterator[str]:
        width = max((len(array.path) for array in self.arrays), default=5)
        head = f"{'array':{width}}  {'dtype':8} {'codec':12} {'chunk':>9} {'chunks':>9} "
        yield f"{head}{'files':>7}  GPU"
        for a in self.arrays:
            size = f"{a.chunk_bytes / 1024:,.0f} KiB" if a.chunk_bytes else "-"
            yield (
                f"{a.path:{width}}  {a.dtype:8} {a.codec:12} {size:>9} {a.chunks:>9,} "
                f"{a.files:>7,}  {'yes' if a.gpu else 'no'}"
            )


def check(path: str | os.PathLike[str]) -> CheckReport:
    """Report how an AnnData store is laid out for reading, on this machine.

    Works without a GPU, and opens no matrix.

    Parameters
    ----------
    path
        zarr folder, zip or URL, or h5ad file.

    Returns
    -------
    The report: ``print`` shows it, `CheckReport.ok` sums it up.

    Raises
    ------
    StoreError
        There is no such store, or it cannot be read.
    FormatError
        It is no AnnData.
    """
    with open_source(path) as source:
        root = source.root
        findings = list(_of_store(root, source.form))
        arrays: list[ArrayReport] = []
        for name in _MATRICES:
            for where, node in _elements(root, name):
                found, reports = _of_element(where, node)
                findings += found
                arrays += reports
        known = {finding.where for finding in findings if finding.refused}
        findings += (f for f in _no_longer_there(root) if f.where not in known)
        if "X" not in root:
            findings.append(
                Finding("X", "there is none", "nothing can be done about it", False)
            )
        shape = (_length(root["obs"]), _length(root["var"]))
        return CheckReport(
            source.path, source.form, shape, tuple(arrays), tuple(findings), inspect_machine()
        )


def _length(frame: Any) -> int:
    if not hasattr(frame, "keys"):
        return int(frame.shape[0])
    return int(names_array(frame[str(frame.attrs.get("_index", "_index"))]).shape[0])


def _of_store(root: Any, form: str) -> Iterator[Finding]:
    if isinstance(root, h5py.Group):
        yield Finding("", f"{form}: HDF5 decodes one chunk at a time, on the CPU", _CONVERT)
        return
    if root.metadata.zarr_format == 2:
        yield Finding("", "zarr format 2: no shards, one file a chunk", _CONVERT)
    refusal = refuse_store(root.store)
    if refusal is not None:
        # Its arrays may still be fine; only the way to them is slow.
        yield Finding("", refusal.reason, refusal.remedy)
    if root.metadata.consolidated_metadata is None:
        local = isinstance(root.store, LocalStore)
        what = "no consolidated metadata: opening it reads one file an array"
        yield Finding("", what, "run zarr.consolidate_metadata on it", slow=not local)
    for table in ("obs", "var"):
        lost = lost_names(root, table) if type(root.store) is LocalStore else None
        if lost is not None:
            yield _without(lost[0].path, [lost[1]])


def _elements(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Matrices of the store by path: X, raw/X, layers/counts and so on."""
    if name not in root:
        return
    node = root[name]
    if name == "X":
        yield name, node
    elif name == "raw":
        if hasattr(node, "keys") and "X" in node:
            yield "raw/X", node["X"]
    elif hasattr(node, "keys"):
        for key in node:
            if encoding(node[key]) in (*SPARSE, "array", ""):
                yield f"{name}/{key}", node[key]


def _of_element(where: str, node: Any) -> tuple[list[Finding], list[ArrayReport]]:
    kind = encoding(node)
    if not hasattr(node, "keys"):
        return _of_array(where, node)
    findings: list[Finding] = []
    arrays: list[ArrayReport] = []
    if kind not in SPARSE or "indices" not in node:
        return findings, arrays
    if where == "X" and kind == "csc_matrix":
        what = "stored by columns (CSC), so no block of cells can be read"
        remedy = "scgpu-tasks convert --csr makes it CSR"
        findings.append(Finding(where, what, remedy, refused=True))
    n_genes = int(node.attrs.get("shape", node.attrs.get("h5sparse_shape"))[1 - SPARSE[kind]])
    for name in ("data", "indices", "indptr"):
        found, reports = _of_array(f"{where}/{name}", node[name])
        # zarr leaves out chunks of zeros, which a few column numbers may well be.
        if name == "data" or (name == "indices" and n_genes > 1):
            few = 0 if name == "data" else _FEW_PLACES
            findings += _lost(f"{where}/{name}", node[name], few)
        elif name == "indptr" and node["data"].shape[0]:
            findings += _lost(f"{where}/{name}", node[name], 0, from_zero=True)
        findings += found
        arrays += reports
    shape = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
    best = index_dtype(int(shape[1 - SPARSE[kind]]))
    indices = node["indices"]
    if indices.dtype.itemsize > best.itemsize and indices.nbytes > _SMALL:
        what = f"{indices.dtype} where {best} holds every index: more bytes to decode"
        findings.append(Finding(f"{where}/indices", what, _CONVERT, slow=False))
    return findings, arrays


def _lost(where: str, array: Any, few: int, *, from_zero: bool = False) -> Iterator[Finding]:
    """Tell of files of more than a few rows that are not there, where zarr would read zeros."""
    if isinstance(array, h5py.Dataset) or type(array.store) is not LocalStore:
        return
    gone, zeros = [], 0
    for key, start, stop in missing_files(array):
        # What rises from 0 may begin with files of zeros, but does not end in one.
        if from_zero and start == zeros and stop < array.shape[0]:
            zeros = stop
        elif stop - start > few:
            gone.append(key)
    if gone:
        yield _without(where, gone)


def _no_longer_there(root: Any) -> Iterator[Finding]:
    """Tell of files that `convert_zarr` wrote and that are gone, by array."""
    if isinstance(root, h5py.Group) or type(root.store) is not LocalStore:
        return
    gone: dict[str, list[str]] = {}
    for array, key in lost_files(str(root.store.root)):
        gone.setdefault(array, []).append(key)
    for array, keys in gone.items():
        yield _without(array, keys)


def _without(where: str, keys: list[str]) -> Finding:
    which = f"{len(keys)} files from {keys[0]} on" if keys[1:] else f"the file {keys[0]}"
    what = f"lost {which}, so reading refuses it"
    return Finding(where, what, _RESTORE, refused=True)


def _of_array(where: str, node: Any) -> tuple[list[Finding], list[ArrayReport]]:
    shape = tuple(int(n) for n in node.shape)
    nbytes = prod(shape) * node.dtype.itemsize
    if isinstance(node, h5py.Dataset):
        chunks = node.chunks or ()
        n = prod(-(-s // c) for s, c in zip(shape, chunks, strict=True)) if chunks else 1
        size = prod(chunks) * node.dtype.itemsize if chunks else 0
        report = ArrayReport(
            where, str(node.dtype), shape, node.compression or "none", size, n, 1, gpu=False
        )
        return [], [report]
    layout = analyse_array(node.metadata)
    report = _zarr_report(where, node, layout)
    if nbytes <= _SMALL:
        return [], [report]
    return list(_findings(where, layout, report, nbytes)), [report]


def _zarr_report(
    where: str, node: zarr.Array[Any], layout: ArrayLayout | Refusal
) -> ArrayReport:
    shape = tuple(int(n) for n in node.shape)
    chunks = prod(-(-n // c) for n, c in zip(shape, node.chunks, strict=True))
    files = prod(-(-n // c) for n, c in zip(shape, node.shards or node.chunks, strict=True))
    names = [_codec_name(codec) for codec in (*node.filters, *node.compressors)]
    return ArrayReport(
        path=where,
        dtype=str(node.dtype),
        shape=shape,
        codec="+".join(names) or "none",
        chunk_bytes=prod(node.chunks) * np.dtype(node.dtype).itemsize,
        chunks=chunks,
        files=files,
        gpu=isinstance(layout, ArrayLayout),
    )


def _codec_name(codec: Any) -> str:
    name = getattr(codec, "codec_id", None)
    return str(name or type(codec).__name__.removesuffix("Codec").lower())


def _findings(
    where: str, layout: ArrayLayout | Refusal, report: ArrayReport, nbytes: int
) -> Iterator[Finding]:
    if isinstance(layout, Refusal):
        if layout.reason != "zarr format 2" or report.codec != "zstd":
            what = f"the GPU cannot decode it ({layout.reason}, {report.codec})"
            yield Finding(where, what, layout.remedy or _CONVERT)
        return
    low, high = _CHUNKS
    size = f"chunks of {report.chunk_bytes / 1024:,.1f} KiB"
    best = f"{_CHUNKS_BEST} decode fastest"
    if report.chunk_bytes < low and report.chunks > 1:
        yield Finding(where, f"{size} are many and small; {best}", _CONVERT)
    elif report.chunk_bytes > high:
        yield Finding(where, f"{size} are large; {best}", _CONVERT)
    if not layout.sharded and report.files > _FEW_FILES:
        yield Finding(where, f"no shards: {report.files:,} files", _CONVERT)
    if nbytes // max(report.files, 1) < low and report.files > _FEW_FILES and layout.sharded:
        yield Finding(where, f"{report.files:,} small shards", _CONVERT)
    if not layout.checksum:
        what = "chunks have no checksum: not all damage to them would be found"
        remedy = "scgpu-tasks convert writes them; older versions of it did not"
        yield Finding(where, what, remedy, slow=False)


_CHUNKS_BEST = f"{CHUNK_BYTES // 1024} KiB"
