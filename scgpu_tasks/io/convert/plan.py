"""Walk a source and list what its converted store will hold, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.convert.layout import Layout, index_dtype, indptr_dtype, plan_layout
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.source import Source, encoding, plain_attrs

# Groups that are no more than their attributes and members.
_CONTAINERS = {
    "",
    "anndata",
    "raw",
    "dict",
    "categorical",
    "nullable-integer",
    "nullable-boolean",
    "nullable-string-array",
    "awkward-array",
}
SPARSE = {"csr_matrix": 0, "csc_matrix": 1}


@dataclass(frozen=True)
class ArrayItem:
    """An array that is streamed.

    Attributes
    ----------
    path
        Where it goes; the parts of a sparse matrix are items of their own.
    source
        Where its values come from.
    layout
        How it is cut.
    attrs
        Attributes of the array in the store.
    kind
        ``copy``: the source's values, cast; ``indices`` or ``data``: rows rearranged first;
        ``indptr``: written from the plan.
    exact
        Whether a cast must not round: everywhere but from float to float, which is asked for.
    limit
        Values must be below it: the number of columns of an ``indices`` array; None: no limit.
    numbers
        Whether it holds the column numbers (row numbers of CSC) of a sparse matrix.
    """

    path: str
    source: str
    layout: Layout
    attrs: dict[str, Any]
    kind: str = "copy"
    exact: bool = True
    limit: int | None = None
    numbers: bool = False


@dataclass(frozen=True)
class SparseItem:
    """A sparse matrix of the source, and what becomes of its rows."""

    path: str
    source: str
    encoding: str
    shape: tuple[int, int]
    nnz: int
    transpose: bool = False
    sort: bool = False
    dedupe: bool = False

    @property
    def rearranged(self) -> bool:
        """Whether stored values change places."""
        return self.transpose or self.sort

    @property
    def major(self) -> int:
        """Rows of a CSR source, columns of a CSC source."""
        return self.shape[SPARSE[self.encoding]]

    @property
    def minor(self) -> int:
        """Columns of a CSR source, rows of a CSC source."""
        return self.shape[1 - SPARSE[self.encoding]]


@dataclass
class Plan:
    """All that a conversion writes, in order."""

    spec: ConvertSpec
    groups: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    arrays: list[ArrayItem] = field(default_factory=list)
    sparse: list[SparseItem] = field(default_factory=list)
    strings: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    elements: list[tuple[str, str]] = field(default_factory=list)
    legacy: bool = False
    notes: list[str] = field(default_factory=list)

    _by_path: dict[str, ArrayItem] = field(default_factory=dict)

    def array(self, path: str) -> ArrayItem:
        """Return the item that goes to `path`."""
        if len(self._by_path) != len(self.arrays):
            self._by_path = {item.path: item for item in self.arrays}
        return self._by_path[path]

    def matrix(self, path: str) -> SparseItem:
        """Return the sparse matrix that goes to `path`."""
        return next(item for item in self.sparse if item.path == path)

    def replace(self, items: list[ArrayItem]) -> None:
        """Put items in place of those with the same paths."""
        new = {item.path: item for item in items}
        self.arrays = [new.get(item.path, item) for item in self.arrays]
        self._by_path = {}


def make_plan(source: Source, spec: ConvertSpec) -> Plan:
    """List everything in a source.

    Raises
    ------
    FormatError
        Something in it cannot be stored as zarr, such as a slash in a column's name.
    """
    plan = Plan(spec)
    root = source.root
    attrs = plain_attrs(root)
    attrs = {"encoding-type": "anndata", "encoding-version": "0.1.0"} | attrs
    plan.groups.append(("", attrs))
    if not hasattr(root["obs"], "keys"):
        plan.legacy = True
        _plan_legacy(plan, source, spec)
        return plan
    if "raw" not in root and "raw.X" in root:
        plan.groups.append(("raw", {"encoding-type": "raw", "encoding-version": "0.1.0"}))
    for name in source.members(""):
        if not name.startswith("raw."):
            _walk(plan, source, spec, name, name)
        elif "raw" not in root:
            _walk(plan, source, spec, name.replace(".", "/", 1), name)
    return plan


def _walk(plan: Plan, source: Source, spec: ConvertSpec, path: str, at: str) -> None:
    node = source.node(at)
    kind = encoding(node)
    is_group = hasattr(node, "keys")
    attrs = plain_attrs(node)
    version = attrs.get("encoding-version", "")
    if is_group and kind in SPARSE:
        _plan_sparse(plan, spec, path, at, node)
    elif is_group and (kind in _CONTAINERS or (kind, version) == ("dataframe", "0.2.0")):
        if path == "raw" and not kind:
            attrs = {"encoding-type": "raw", "encoding-version": "0.1.0"} | attrs
        elif not kind:
            attrs = {"encoding-type": "dict", "encoding-version": "0.1.0"} | attrs
        plan.groups.append((path, attrs))
        if kind == "dataframe":
            _check_columns(source, path, node, attrs)
        for name in source.members(at):
            _check_name(source, path, name)
            _walk(plan, source, spec, f"{path}/{name}", f"{at}/{name}")
    elif not is_group and kind == "string-array" and len(node.shape) >= 1:
        plan.strings.append((path, at, attrs))
    elif not is_group and _streams(node, kind, path):
        plan_dense(plan, spec, path, at, node)
    else:
        plan.elements.append((path, at))


def _check_name(source: Source, path: str, name: str) -> None:
    # zarr takes a backslash for a slash.
    if "\\" in name or name in (".", "..", "zarr.json"):
        msg = (
            f"{source.path}: {path} has a member named {name!r}, which zarr cannot hold; "
            "rename it in the source"
        )
        raise FormatError(msg)


def _check_columns(source: Source, path: str, node: Any, attrs: dict[str, Any]) -> None:
    wanted = [attrs.get("_index"), *attrs.get("column-order", [])]
    for name in wanted:
        if name is not None and "/" in str(name):
            msg = (
                f"{source.path}: {path} has a column named {name!r}, and zarr takes a slash "
                "for a group within a group; rename it in the source"
            )
            raise FormatError(msg)
        if name is None or str(name) not in node:
            msg = f"{source.path}: {path} lists a column {name!r} that is not stored"
            raise FormatError(msg)


def _streams(node: Any, kind: str, path: str) -> bool:
    """Whether an array is plain numbers; old files say no more of X and obsm than that."""
    if kind not in ("", "array") or not node.shape:
        return False
    if not kind and path.split("/")[0] == "uns":
        return False
    return (
        node.dtype.kind in "biufc" and node.dtype.itemsize <= 16 and node.dtype.char not in "gG"
    )


def _is_main(path: str) -> bool:
    return path in ("X", "raw/X") or path.startswith("layers/")


def plan_dense(plan: Plan, spec: ConvertSpec, path: str, at: str, node: Any) -> None:
    """Add a dense array."""
    attrs = {"encoding-type": "array", "encoding-version": "0.2.0"} | plain_attrs(node)
    dtype = np.dtype(spec.data_dtype or node.dtype) if _is_main(path) else node.dtype
    plan.arrays.append(_copied(spec, path, at, node, np.dtype(dtype), attrs))


def _copied(
    spec: ConvertSpec, path: str, at: str, node: Any, dtype: np.dtype, attrs: dict[str, Any]
) -> ArrayItem:
    dtype = np.dtype(dtype.str)
    layout = plan_layout(
        tuple(node.shape), dtype, chunk_bytes=spec.chunk_bytes, shard_bytes=spec.shard_bytes
    )
    exact = not (dtype.kind == "f" and node.dtype.kind == "f")
    return ArrayItem(path, at, layout, attrs, exact=exact)


def _plan_sparse(plan: Plan, spec: ConvertSpec, path: str, at: str, node: Any) -> None:
    attrs = plain_attrs(node)
    kind = encoding(node)
    shape = attrs.pop("h5sparse_shape", attrs.get("shape"))
    attrs.pop("h5sparse_format", None)
    if shape is None or len(shape) != 2:
        msg = f"{path} is a {kind} without a shape of two numbers (found {shape})"
        raise FormatError(msg)
    missing = [name for name in ("data", "indices", "indptr") if name not in node]
    if missing:
        msg = f"{path} is a {kind} without {', '.join(missing)}"
        raise FormatError(msg)
    nnz = int(node["data"].shape[0])
    main = _is_main(path)
    transpose = spec.csr and main and kind == "csc_matrix"
    if path == "X" and kind == "csc_matrix" and not transpose:
        plan.notes.append("X stays by columns (CSC), so QC cannot read it; --csr makes it CSR")
    item = SparseItem(
        path,
        at,
        kind,
        (int(shape[0]), int(shape[1])),
        nnz,
        transpose=transpose,
        sort=main and (spec.sort_indices or spec.sum_duplicates or transpose),
        dedupe=main and spec.sum_duplicates,
    )
    plan.sparse.append(item)
    plan.groups.append((path, sparse_attrs(attrs, item)))
    plan.arrays.extend(sparse_arrays(spec, item, node))


def sparse_attrs(attrs: dict[str, Any], item: SparseItem) -> dict[str, Any]:
    """Attributes of the group of a sparse matrix in the store."""
    form = "csr_matrix" if item.transpose else item.encoding
    fixed = {"encoding-type": form, "encoding-version": "0.1.0", "shape": list(item.shape)}
    return attrs | fixed


def sparse_arrays(
    spec: ConvertSpec, item: SparseItem, node: Any, nnz: int | None = None
) -> list[ArrayItem]:
    """Return the three arrays of a sparse matrix; `nnz` if duplicates change their number."""
    nnz = item.nnz if nnz is None else nnz
    major, minor = item.major, item.minor
    if item.transpose:
        major, minor = minor, major
    main = _is_main(item.path)
    stored = np.dtype(node["data"].dtype.str)
    data = np.dtype(spec.data_dtype) if spec.data_dtype and main else stored
    sizes = {"chunk_bytes": spec.chunk_bytes, "shard_bytes": spec.shard_bytes}
    # Indices take longest to compress, so they go first: no thread is to have one at the end.
    parts = [
        ("indices", (nnz,), index_dtype(minor), True, minor),
        ("data", (nnz,), data, not (data.kind == "f" and stored.kind == "f"), None),
        ("indptr", (major + 1,), indptr_dtype(nnz), True, nnz + 1),
    ]
    items = []
    for name, shape, dtype, exact, limit in parts:
        changed = item.transpose or item.dedupe if name == "indptr" else item.rearranged
        items.append(
            ArrayItem(
                f"{item.path}/{name}",
                f"{item.source}/{name}",
                plan_layout(shape, dtype, **sizes),
                plain_attrs(node[name]),
                kind=name if changed else "copy",
                exact=exact,
                limit=limit,
                numbers=name == "indices",
            )
        )
    return items


def _plan_legacy(plan: Plan, source: Source, spec: ConvertSpec) -> None:
    """List the matrices of a file of anndata before 0.7; the rest anndata reads itself."""
    root: Any = source.root
    matrices = [("X", "X"), ("raw.X", "raw/X")]
    if "layers" in root:
        matrices += [(f"layers/{name}", f"layers/{name}") for name in root["layers"]]
    if "raw.X" in root:
        plan.groups.append(("raw", {"encoding-type": "raw", "encoding-version": "0.1.0"}))
    layers = {"encoding-type": "dict", "encoding-version": "0.1.0"}
    plan.groups.append(("layers", layers))
    for at, path in matrices:
        if at.split("/")[0] not in root:
            continue
        node = root[at]
        if hasattr(node, "keys"):
            _plan_sparse(plan, spec, path, at, node)
        else:
            plan_dense(plan, spec, path, at, node)
    plan.notes.append("written by an anndata before 0.7: read through anndata's own reader")
