"""A zarr codec pipeline that reads chunks straight into GPU memory.

zarr loads this module by entry point on any machine, whenever it looks a pipeline up: nothing
here imports a GPU library before an output buffer on a GPU is asked for.
"""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
from zarr.abc.codec import Codec, CodecPipeline, GetResult
from zarr.abc.store import Store
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import NDBuffer, cpu, default_buffer_prototype
from zarr.core.codec_pipeline import FusedCodecPipeline
from zarr.core.config import config
from zarr.core.metadata import ArrayV2Metadata
from zarr.core.metadata.v3 import RegularChunkGridMetadata
from zarr.storage._common import StorePath

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.counters import ArrayCounts, count
from scgpu_tasks.io.layout import ArrayLayout, Refusal, analyse_array, refuse_store
from scgpu_tasks.io.request import Request
from scgpu_tasks.io.selection import UnsupportedRequestError, count_chunks

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer
    from zarr.core.metadata import ArrayMetadata

PATH = "scgpu_tasks.io.pipeline.KvikioCodecPipeline"
"""What ``codec_pipeline.path`` of zarr's configuration holds to choose this pipeline."""

FALLBACK_KEY = "codec_pipeline.gpu_fallback"
"""Key of zarr's configuration: path of the pipeline for everything that is not for the GPU."""

STRICT_KEY = "codec_pipeline.gpu_strict"
"""Key of zarr's configuration: whether decoding for the GPU on the host is an error."""

_LITTLE = 2**20  # bytes, which one core decodes in a millisecond or two

_FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
_BATCHED = "zarr.core.codec_pipeline.BatchedCodecPipeline"


@dataclass
class KvikioCodecPipeline(CodecPipeline):
    """Reads zstd-compressed and raw chunks of a local store into GPU memory.

    It serves requests whose output buffer is on a GPU, such as those made with
    ``prototype=zarr.core.buffer.gpu.buffer_prototype``: KvikIO reads the stored bytes into
    device memory, and nvCOMP decodes them there. A few chunks are decoded on the host, sooner
    than nvCOMP would; see :class:`~scgpu_tasks.io.settings.ReadSettings`. What the GPU cannot
    decode is decoded on the host by the fallback pipeline and copied once. Host buffers and
    writes go to the fallback pipeline as they are.

    Parameters
    ----------
    metadata, store
        Of the array.
    fallback_path
        Import path of the fallback pipeline's class.
    strict
        Whether decoding on the host for a GPU buffer is an error.

    Raises
    ------
    CorruptChunkError
        On reading, where stored bytes do not decode to what the metadata promises.
    FormatError
        On reading in strict mode, where the GPU cannot decode.

    Notes
    -----
    Chunks of ``ZstdCodec(checksum=True)``, which :func:`~scgpu_tasks.io.convert_zarr` writes,
    and chunks with a crc32c codec are verified on the GPU: what is read is what was written, or
    an error. Without either, all that a frame says about itself is checked, but not whether its
    entropy-coded streams end where they should, as nvCOMP does not tell: damage inside those
    bytes can decode to other numbers, within that chunk, where the host's library often finds
    it. Raw chunks without crc32c hold whatever the disk returns, here as on the host.

    nvCOMP can hang on damaged entropy-coded streams. After
    :attr:`~scgpu_tasks.io.settings.ReadSettings.decode_seconds` the host finds and names the
    damaged chunk, and further reads of the process on that GPU are refused. Only a crc32c
    codec, checked before decoding, keeps it from happening.
    """

    metadata: ArrayMetadata
    store: Store
    fallback_path: str = _FUSED
    strict: bool = False
    _host: dict[str, CodecPipeline] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec]) -> Self:
        """Return an ordinary pipeline of these codecs, as zarr's sharding codec needs it."""
        pipeline = _pipeline_class(_configured_fallback()).from_codecs(codecs)
        return cast("Self", pipeline)

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: ArrayMetadata, store: Store) -> Self:
        """Return the pipeline of one array; zarr calls this when it opens the array."""
        return cls(
            metadata=array_metadata,
            store=store,
            fallback_path=_configured_fallback(),
            strict=bool(config.get(STRICT_KEY, False)),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Metadata, store and two settings: pickles are small, and GPU state stays here."""
        return {
            "metadata": self.metadata,
            "store": self.store,
            "fallback_path": self.fallback_path,
            "strict": self.strict,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, with everything else made on first use."""
        self.__dict__.update(state)
        self._host = {}

    # The ordinary parts of a pipeline are the fallback's.

    @property
    def fallback(self) -> CodecPipeline:
        """The pipeline for host buffers, for writing, and for what the GPU cannot decode."""
        return self._host_pipeline(self.fallback_path)

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:  # noqa: ARG002
        """Return itself: the metadata already say everything."""
        return self

    @property
    def supports_partial_decode(self) -> bool:
        """As the fallback pipeline."""
        return self.fallback.supports_partial_decode

    @property
    def supports_partial_encode(self) -> bool:
        """As the fallback pipeline."""
        return self.fallback.supports_partial_encode

    def __iter__(self) -> Iterator[Codec]:
        """Iterate over the array's codecs."""
        return iter(_codecs(self.metadata))

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """As the fallback pipeline."""
        self.fallback.validate(shape=shape, dtype=dtype, chunk_grid=chunk_grid)

    def compute_encoded_size(self, byte_length: int, array_spec: ArraySpec) -> int:
        """As the fallback pipeline."""
        return self.fallback.compute_encoded_size(byte_length, array_spec)

    async def decode(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """As the fallback pipeline."""
        return await self.fallback.decode(chunk_bytes_and_specs)

    async def encode(
        self, chunk_arrays_and_specs: Iterable[tuple[NDBuffer | None, ArraySpec]]
    ) -> Iterable[Buffer | None]:
        """As the fallback pipeline."""
        return await self.fallback.encode(chunk_arrays_and_specs)

    async def write(
        self,
        batch_info: Iterable[tuple[Any, ...]],
        value: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> None:
        """As the fallback pipeline; values on a GPU are copied to the host first."""
        batch = list(batch_info)
        if on_gpu(value.as_ndarray_like()):
            batch = _for_host(batch)
            value = cpu.NDBuffer.from_numpy_array(value.as_numpy_array())
            await self._host_for_gpu().write(batch, value, drop_axes)
            return
        await self.fallback.write(batch, value, drop_axes)

    async def read(
        self,
        batch_info: Iterable[tuple[Any, ...]],
        out: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> tuple[GetResult, ...]:
        """Read into ``out``: by GPU where it lies on one, by the fallback pipeline otherwise.

        Returns
        -------
        For every entry of ``batch_info``, whether its file was present or missing.
        """
        batch = list(batch_info)
        target = out.as_ndarray_like()
        if not batch:
            return ()
        if not self._is_for_gpu(target):
            return await self.fallback.read(batch, out, drop_axes)
        refusal = self._refuse(batch, target)
        if refusal is None:
            try:
                # Handing it to a thread and back would take as long as all of it. Where others
                # wait for zarr's event loop, though, the disk is to serve all at once.
                alone = len(asyncio.all_tasks()) == 1
                if alone and self._is_little(batch) and self._can_begin(target):
                    return self._read(batch, target, drop_axes, None)
                ready = self._mark(target)
                return await asyncio.to_thread(self._read, batch, target, drop_axes, ready)
            except UnsupportedRequestError as error:
                refusal = Refusal(f"a request with {error}", "")
        return await self._read_on_host(batch, out, drop_axes, refusal)

    # How a request is served; the tests serve it from the host by overriding these five.

    def _is_for_gpu(self, target: Any) -> bool:
        return on_gpu(target)

    def _mark(self, target: Any) -> Any:
        from scgpu_tasks.io.handover import mark

        return mark(target)

    def _can_begin(self, target: Any) -> bool:
        from scgpu_tasks.io.handover import may_be_written
        from scgpu_tasks.io.scratch import is_idle

        return is_idle(target.device.id) and may_be_written(target)

    def _most_on_host(self) -> int:
        from scgpu_tasks.io.gpu_packages import settings

        return settings().small_request

    def _execute(
        self, open_request: Any, target: Any, ready: Any
    ) -> tuple[Request, ArrayCounts]:
        from scgpu_tasks.io.decode import execute

        return execute(open_request, target, ready, strict=self.strict)

    @cached_property
    def _layout(self) -> ArrayLayout | Refusal:
        return analyse_array(self.metadata)

    def _refuse(self, batch: Sequence[tuple[Any, ...]], target: Any) -> Refusal | None:
        layout = self._layout
        if isinstance(layout, Refusal):
            return layout
        getter, spec = batch[0][0], batch[0][1]
        if not isinstance(getter, StorePath):
            return Refusal(f"byte getter {type(getter).__name__}", "")
        refused = refuse_store(getter.store)
        if refused is not None:
            return refused
        if tuple(spec.shape) != layout.file_shape:
            return Refusal("chunks of another shape than the metadata say", "")
        if target.dtype != layout.dtype:
            return Refusal(f"output of dtype {target.dtype} for an array of {layout.dtype}", "")
        return None

    def _is_little(self, batch: Sequence[tuple[Any, ...]]) -> bool:
        """Whether a request takes the host so little that zarr's event loop may do it."""
        layout = self._layout
        if len(batch) != 1 or isinstance(layout, Refusal) or not layout.zstd:
            return False
        chunks = count_chunks(layout, batch[0][2])
        return chunks * layout.chunk_nbytes <= _LITTLE and chunks <= self._most_on_host()

    @cached_property
    def _key_parts(self) -> int:
        return self.metadata.encode_chunk_key((0,) * len(self.metadata.shape)).count("/") + 1

    def _read(
        self,
        batch: Sequence[tuple[Any, ...]],
        target: Any,
        drop_axes: tuple[int, ...],
        ready: Any,
    ) -> tuple[GetResult, ...]:
        layout = self._layout
        if isinstance(layout, Refusal):  # decided before; said again for the type checker
            raise FormatError(str(layout))

        def open_request(opener: Any) -> Request:
            return Request(
                layout, batch, self._key_parts, target.shape, target.strides, drop_axes, opener
            )

        request, counts = self._execute(open_request, target, ready)
        count(_array_name(batch[0][0], self._key_parts), counts)
        return tuple(
            GetResult(status="missing" if file.stamp is None else "present")
            for file in request.files
        )

    async def _read_on_host(
        self,
        batch: Sequence[tuple[Any, ...]],
        out: NDBuffer,
        drop_axes: tuple[int, ...],
        refusal: Refusal,
    ) -> tuple[GetResult, ...]:
        """Decode on the host by the fallback pipeline, then copy to the GPU once."""
        name = _array_name(batch[0][0], self._key_parts)
        if self.strict:
            msg = f"the GPU cannot decode {name}: {refusal}; or switch strict mode off"
            raise FormatError(msg)
        target: Any = out.as_ndarray_like()
        order: Literal["C", "F"] = "F" if target.ndim > 1 and target.flags.f_contiguous else "C"
        host = cpu.NDBuffer.create(shape=target.shape, dtype=target.dtype, order=order)
        results = await self._host_for_gpu().read(_for_host(batch), host, drop_axes)
        ready = self._mark(target)
        await asyncio.to_thread(self._upload, host.as_numpy_array(), target, ready)
        nbytes = int(target.dtype.itemsize) * int(np.prod(target.shape, dtype=np.int64))
        counts = ArrayCounts(host_bytes=nbytes)
        counts.host_requests[refusal.reason] += 1
        count(name, counts)
        return results

    def _upload(self, host: Any, target: Any, ready: Any) -> None:
        from scgpu_tasks.io.handover import upload

        upload(host, target, ready)

    def _host_for_gpu(self) -> CodecPipeline:
        # While zarr is configured for GPU buffers, only its fused pipeline can serve host
        # buffers for every selection.
        host_only = default_buffer_prototype().nd_buffer is cpu.NDBuffer
        return self._host_pipeline(self.fallback_path if host_only else _FUSED)

    def _host_pipeline(self, path: str) -> CodecPipeline:
        made = self._host.get(path)
        if made is None:
            made = self._host[path] = _make_pipeline(path, self.metadata, self.store)
        return made


def on_gpu(array: Any) -> bool:
    """Tell whether an array lies in GPU memory."""
    # NumPy arrays are by far the most frequent, and this is asked for every request.
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def _configured_fallback() -> str:
    path = config.get(FALLBACK_KEY, None) or _FUSED
    return _FUSED if path in (PATH, _BATCHED) else path


def _pipeline_class(path: str) -> type[CodecPipeline]:
    if path == _FUSED:
        return FusedCodecPipeline
    found = pkgutil.resolve_name(path)
    if not (isinstance(found, type) and issubclass(found, CodecPipeline)):
        msg = f"{path} is no codec pipeline; set {FALLBACK_KEY} of zarr's configuration"
        raise FormatError(msg)
    return found


def _make_pipeline(path: str, metadata: ArrayMetadata, store: Store) -> CodecPipeline:
    """Make a pipeline as zarr does for an array, but of a class of our choice."""
    cls = _pipeline_class(path)
    try:
        return cls.from_array_metadata_and_store(array_metadata=metadata, store=store)
    except NotImplementedError:
        pass
    if isinstance(metadata, ArrayV2Metadata):
        shape, dtype, order = metadata.chunks, metadata.dtype, {"order": metadata.order}
    else:
        grid, dtype, order = metadata.chunk_grid, metadata.data_type, {}
        regular = isinstance(grid, RegularChunkGridMetadata)
        shape = grid.chunk_shape if regular else (1,) * len(metadata.shape)  # type: ignore[union-attr]
    spec = ArraySpec(
        shape=shape,
        dtype=dtype,
        fill_value=metadata.fill_value,
        config=ArrayConfig.from_dict(order),  # type: ignore[arg-type]
        prototype=cpu.buffer_prototype,
    )
    return cls.from_codecs(_codecs(metadata)).evolve_from_array_spec(spec)


def _codecs(metadata: ArrayMetadata) -> list[Codec]:
    if isinstance(metadata, ArrayV2Metadata):
        return [V2Codec(filters=metadata.filters, compressor=metadata.compressor)]
    return list(metadata.codecs)


def _for_host(batch: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the batch with specs that ask for host buffers."""
    made: dict[int, ArraySpec] = {}
    host = []
    for getter, spec, *rest in batch:
        if id(spec) not in made:
            made[id(spec)] = replace(spec, prototype=cpu.buffer_prototype)
        host.append((getter, made[id(spec)], *rest))
    return host


def _array_name(getter: Any, key_parts: int) -> str:
    if not isinstance(getter, StorePath):
        return type(getter).__name__
    path = "/".join(getter.path.split("/")[:-key_parts])
    root = getattr(getter.store, "root", getter.store)
    return f"{root}/{path}".removesuffix("/")
