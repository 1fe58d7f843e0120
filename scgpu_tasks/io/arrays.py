"""Zarr arrays with a codec pipeline of their own choice, whatever zarr's configuration says."""

from __future__ import annotations

from typing import Any

import zarr
from zarr.abc.codec import Codec, CodecPipeline
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import cpu
from zarr.core.codec_pipeline import BatchedCodecPipeline, FusedCodecPipeline
from zarr.core.metadata import ArrayMetadata, ArrayV2Metadata
from zarr.storage import LocalStore
from zarrs.pipeline import (
    UnsupportedMetadataError,
    ZarrsCodecPipeline,
    get_codec_pipeline_impl,
)


def attach_pipeline(array: zarr.Array[Any], pipeline: CodecPipeline) -> zarr.Array[Any]:
    """Let `pipeline` encode and decode this array, whichever zarr's configuration names.

    Returns
    -------
    The same array.
    """
    object.__setattr__(array.async_array, "codec_pipeline", pipeline)
    return array


def host_pipeline(array: zarr.Array[Any]) -> CodecPipeline:
    """Return zarrs' pipeline for reading this array, or the fused one where zarrs cannot."""
    metadata, store = array.async_array.metadata, array.async_array.store_path.store
    if isinstance(store, LocalStore):
        try:
            impl = get_codec_pipeline_impl(metadata, store, strict=True)
        except UnsupportedMetadataError:
            pass
        else:
            slow = BatchedCodecPipeline.from_codecs(_codecs(metadata))
            return ZarrsCodecPipeline(metadata, store, impl, slow)
    return fused_pipeline(array)


def fused_pipeline(array: zarr.Array[Any]) -> CodecPipeline:
    """Return zarr's fused pipeline: it alone writes a shard in chunk order."""
    metadata = array.async_array.metadata
    dtype = metadata.dtype if isinstance(metadata, ArrayV2Metadata) else metadata.data_type
    spec = ArraySpec(
        shape=tuple(array.shards or array.chunks),
        dtype=dtype,
        fill_value=metadata.fill_value,
        config=ArrayConfig.from_dict({}),
        prototype=cpu.buffer_prototype,
    )
    pipeline = FusedCodecPipeline.from_codecs(_codecs(metadata))
    return pipeline.evolve_from_array_spec(spec)


def _codecs(metadata: ArrayMetadata) -> list[Codec]:
    if isinstance(metadata, ArrayV2Metadata):
        return [V2Codec(filters=metadata.filters, compressor=metadata.compressor)]
    return list(metadata.codecs)
