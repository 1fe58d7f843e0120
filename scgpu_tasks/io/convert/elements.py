"""Copy what is not a large matrix: groups, strings, and single elements through anndata."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import zarr
from zarr.codecs import ZstdCodec
from zarr.core.dtype import VariableLengthUTF8

from scgpu_tasks.errors import CorruptChunkError, FormatError
from scgpu_tasks.io.convert.compare import difference
from scgpu_tasks.io.convert.plan import ArrayItem, Plan
from scgpu_tasks.io.convert.texts import Texts, write_strings
from scgpu_tasks.io.source import Source, plain_attrs, reading

_STRINGS_PER_CHUNK = 100_000


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings about forms that anndata itself writes, and about old files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*does not have a Zarr V3 specification")
        warnings.filterwarnings("ignore", message=r".*Consolidated metadata is currently not")
        warnings.filterwarnings("ignore", category=ad.OldFormatWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def create_groups(root: zarr.Group, plan: Plan) -> None:
    """Make all groups, parents first, with their attributes.

    Files of arrays may lie in their folders already, so nothing is overwritten.
    """
    for path, attrs in plan.groups:
        if path:
            root.create_group(path, attributes=attrs)
        else:
            root.attrs.put(attrs)


def create_array(root: zarr.Group, item: ArrayItem, level: int) -> None:
    """Write the metadata of an array whose files are written later."""
    layout = item.layout
    root.create_array(
        item.path,
        shape=layout.shape,
        dtype=np.dtype(layout.dtype),
        chunks=layout.chunk,
        shards=layout.shard,
        compressors=ZstdCodec(level=level, checksum=True),
        fill_value=False if np.dtype(layout.dtype).kind == "b" else 0,
        attributes=item.attrs,
    )


def create_strings(
    source: Source, at: str, root: zarr.Group, path: str, attrs: dict[str, Any], level: int
) -> None:
    """Write the metadata of an array of strings, and what it holds if it has several axes."""
    node = source.node(at)
    dtype: Any = VariableLengthUTF8()
    chunks = tuple(max(1, n) for n in node.shape)
    with quiet():
        array = root.create_array(
            path,
            shape=node.shape,
            dtype=dtype,
            chunks=(min(_STRINGS_PER_CHUNK, chunks[0]), *chunks[1:]),
            compressors=ZstdCodec(level=level, checksum=True),
            attributes=attrs,
            overwrite=True,
        )
        if node.ndim == 1:
            return
        for start in range(0, node.shape[0], array.chunks[0]):
            with reading(source.path, at):
                values = Texts(node)(start, start + array.chunks[0])
            array[start : start + array.chunks[0]] = values


def copy_strings(source: Source, at: str, root: zarr.Group, path: str, level: int) -> None:
    """Copy an array of strings with one axis, which `create_strings` made, in slices.

    Threads other than the main one may do so: it leaves the filters of warnings alone.
    """
    node: Any = source.node(at)
    array: Any = root[path]
    if node.ndim > 1:
        return
    read, rows = Texts(node), array.chunks[0]
    for start in range(0, node.shape[0], rows):
        with reading(source.path, at):
            values = read(start, start + rows)
        write_strings(array, start // rows, values, level)


def check_strings(source: Source, at: str, root: zarr.Group, path: str) -> None:
    """Compare an array of strings with its source.

    Raises
    ------
    CorruptChunkError
        They differ; names the first place and both values.
    """
    node, array = source.node(at), root[path]
    read, back = Texts(node), Texts(array)
    rows = _STRINGS_PER_CHUNK
    for start in range(0, node.shape[0], rows):
        with reading(source.path, at):
            want = read(start, start + rows)
        found = back(start, start + rows)
        if want.shape == found.shape and (want == found).all():
            continue
        place = tuple(int(i) for i in np.argwhere(want != found)[0])
        where = ", ".join(map(str, (start + place[0], *place[1:])))
        msg = (
            f"position {where} holds {found[place]!r} instead of the source's {want[place]!r}; "
            "run the conversion again"
        )
        raise CorruptChunkError(msg, store=str(root.store), array=path)


def copy_element(source: Source, at: str, root: zarr.Group, path: str) -> None:
    """Copy one element through anndata.

    Raises
    ------
    FormatError
        anndata cannot read it from the source, or cannot write it to zarr.
    """
    parent, _, name = path.rpartition("/")
    node = source.node(at)
    if isinstance(node, h5py.Dataset) and _holds_objects(node.dtype):
        msg = (
            f"{source.path}: {at} holds references, or lists of varying length, which zarr "
            "cannot; remove it from the source"
        )
        raise FormatError(msg)
    try:
        with quiet():
            if _is_fixed_width(node):
                _copy_fixed_width(node, root, path)
                return
            with reading(source.path, at):
                value = ad.io.read_elem(node)
            ad.io.write_elem(root[parent] if parent else root, name, value)
    except (ad._io.specs.registry.IORegistryError, ValueError, TypeError, KeyError) as error:
        msg = f"{source.path}: {at} cannot be stored as zarr v3: {error}"
        raise FormatError(msg) from error


def _holds_objects(dtype: np.dtype) -> bool:
    return dtype.kind == "O" and h5py.check_string_dtype(dtype) is None


def check_element(source: Source, at: str, root: zarr.Group, path: str) -> None:
    """Compare one element with its source.

    Raises
    ------
    CorruptChunkError
        They differ; names the first place and both values.
    """
    node: Any = source.node(at)
    copy: Any = root[path]
    with quiet():
        if _is_fixed_width(node):
            told = difference(np.asarray(node[...]), np.asarray(copy[...]), path)
        else:
            told = difference(ad.io.read_elem(node), ad.io.read_elem(copy), path)
    _refuse(told, root, path)


def _refuse(told: str | None, root: zarr.Group, path: str) -> None:
    if told is not None:
        msg = f"{told}; run the conversion again"
        raise CorruptChunkError(msg, store=str(root.store), array=path)


def _is_fixed_width(node: Any) -> bool:
    return isinstance(node, zarr.Array) and bool(node.shape) and node.dtype.kind in "VSUMm"


def _copy_fixed_width(node: zarr.Array[Any], root: zarr.Group, path: str) -> None:
    """Copy an array of records, times or fixed-width strings as it is stored."""
    shape = node.shape
    array = root.create_array(
        path,
        shape=shape,
        dtype=node.dtype,
        chunks=tuple(max(1, n) for n in shape),
        attributes=plain_attrs(node),
        overwrite=True,
    )
    if 0 not in shape:
        array[...] = np.asarray(node[...])


def copy_legacy(
    source: Source, root: zarr.Group, scratch: Path, *, verify: bool = False
) -> None:
    """Copy all but the matrices of a file of anndata before 0.7, and compare if asked to.

    anndata reads a copy of the file that has no matrices, so its own rules for old files apply.
    """
    if source.kind != "h5ad":
        msg = (
            f"{source.path} is a zarr store of anndata before 0.7, whose strings today's zarr "
            "cannot read, and whose sparse layers and raw hold zeros, as that release lost "
            "them; open it with the anndata that wrote it, and save it as h5ad"
        )
        raise FormatError(msg)
    scratch.parent.mkdir(exist_ok=True)
    small = scratch.with_suffix(".h5ad")
    with h5py.File(small, "w") as file:
        for name in source.root:
            if name == "raw.X":
                _empty_like(source.root[name], file)
            elif name not in ("X", "layers"):
                file.copy(source.root[name], name)
    with quiet():
        adata = ad.read_h5ad(small)
        small.unlink()
        parts = ["obs", "var", "obsm", "varm", "obsp", "varp", "uns"]
        found: dict[str, Any] = {name: getattr(adata, name) for name in parts}
        raw: Any = adata.raw
        if raw is not None:
            found |= {"raw/var": raw.var, "raw/varm": raw.varm}
        for path, value in found.items():
            plain = value if isinstance(value, pd.DataFrame) else dict(value)
            parent, _, name = path.rpartition("/")
            ad.io.write_elem(root[parent] if parent else root, name, plain)
            if verify:
                _refuse(difference(plain, ad.io.read_elem(root[path]), path), root, path)


def _empty_like(node: Any, file: h5py.File) -> None:
    """Write a matrix of this shape that takes no room, so that raw.var is read."""
    shape = node.shape if hasattr(node, "shape") else node.attrs["h5sparse_shape"]
    group = file.create_group("raw.X")
    group.attrs["h5sparse_format"] = "csr"
    group.attrs["h5sparse_shape"] = shape
    group.create_dataset("data", data=np.empty(0, np.float32))
    group.create_dataset("indices", data=np.empty(0, np.int32))
    group.create_dataset("indptr", data=np.zeros(int(shape[0]) + 1, np.int32))
