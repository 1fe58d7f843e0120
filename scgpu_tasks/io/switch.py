"""Switch GPU reads on and off, in this process or on all workers of a Dask cluster."""

from __future__ import annotations

import itertools
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zarr
from distributed import WorkerPlugin

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.io import gpu_packages, scratch
from scgpu_tasks.io.counters import read_statistics, reset_statistics
from scgpu_tasks.io.pipeline import FALLBACK_KEY, PATH, STRICT_KEY
from scgpu_tasks.io.settings import SWITCH_SECONDS

if TYPE_CHECKING:
    from distributed import Client, Worker

__all__ = ["Enabled", "enable", "read_statistics", "release_memory", "reset_statistics"]

_numbers = itertools.count()
_lock = threading.RLock()


def enable(client: Client | None = None, *, strict: bool = False) -> Enabled:
    """Let zarr read into GPU buffers straight from disk.

    From here on zarr opens arrays with :class:`~scgpu_tasks.io.pipeline.KvikioCodecPipeline`.
    It serves requests for GPU buffers, for example ``array.get_basic_selection(...,
    prototype=zarr.core.buffer.gpu.buffer_prototype)`` or all while ``zarr.config.enable_gpu()``
    is on. Everything else goes to the pipeline that was configured before, so that zarrs stays
    as fast as it was. Arrays that are already open keep the pipeline they have. Meanwhile
    threads of Python take turns more often (``sys.setswitchinterval``): those that feed a GPU
    wait for each other less.

    Parameters
    ----------
    client
        Of a Dask cluster: switch on for all its workers, those that join later too. Without it,
        for this process.
    strict
        Raise an error where the host would have to decode for a GPU buffer.

    Returns
    -------
    Already on; as a context manager, or by :meth:`Enabled.disable`, it can be undone.

    Raises
    ------
    MissingPackageError
        CuPy, KvikIO, nvCOMP or a GPU is missing, here or on a worker.
    """
    return Enabled(client, strict=strict)


class Enabled:
    """GPU reads, switched on; made by :func:`enable`.

    Parameters
    ----------
    client, strict
        As for :func:`enable`.
    """

    def __init__(self, client: Client | None, *, strict: bool) -> None:
        self._client = client
        self._plugin: str | None = None
        self._level: _Level | None = None
        if client is None:
            gpu_packages.require_gpu()
            self._level = _switch_on(strict=strict)
            return
        if client.asynchronous:
            msg = "enable(client) needs a client that is not asynchronous"
            raise ParameterError(msg)
        name = f"scgpu_tasks-gpu-reads-{next(_numbers)}"
        try:
            client.register_plugin(_GpuReads(strict), name=name)
        except BaseException:
            # The scheduler would go on sending it to workers that join.
            client.unregister_worker_plugin(name)
            raise
        self._plugin = name

    def disable(self) -> None:
        """Undo; a second call does nothing."""
        level, self._level = self._level, None
        plugin, self._plugin = self._plugin, None
        if level is not None:
            _switch_off(level)
        if plugin is not None and self._client is not None:
            self._client.unregister_worker_plugin(plugin)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo, also after an exception."""
        self.disable()


def release_memory(client: Client | None = None) -> int:
    """Free the scratch of GPU reads: in this process, or on all workers.

    Parameters
    ----------
    client
        Of a Dask cluster; without it, this process.

    Returns
    -------
    Bytes of device memory that were given back; reads that are running keep theirs.
    """
    if client is None:
        return scratch.release_memory()
    return sum(client.run(scratch.release_memory).values())


def is_enabled() -> bool:
    """Tell whether zarr opens arrays for GPU reads in this process."""
    return zarr.config.get("codec_pipeline.path") == PATH


class _Level:
    """One change of zarr's configuration."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.closed = False


# Changes are undone in the order in which they nest, whatever order they are closed in:
# workers that share a process come and go in any order.
_levels: list[_Level] = []
_interval_before = sys.getswitchinterval()


def _switch_on(*, strict: bool) -> _Level:
    global _interval_before
    with _lock:
        if not _levels:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval_before, SWITCH_SECONDS))
        before = zarr.config.get("codec_pipeline.path")
        settings: dict[str, Any] = {"codec_pipeline.path": PATH, STRICT_KEY: strict}
        if before != PATH:
            settings[FALLBACK_KEY] = before
        _levels.append(_Level(zarr.config.set(settings)))
        return _levels[-1]


def _switch_off(level: _Level) -> None:
    with _lock:
        level.closed = True
        while _levels and _levels[-1].closed:
            _levels.pop().config.__exit__(None, None, None)
            if not _levels:
                sys.setswitchinterval(_interval_before)


class _GpuReads(WorkerPlugin):
    """Switches GPU reads on where a worker starts, and off where it or the plugin goes."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        # Workers that share a process share this object too.
        self._enabled: dict[str, Enabled] = {}

    def setup(self, worker: Worker) -> None:
        self._enabled[worker.address] = Enabled(None, strict=self.strict)

    def teardown(self, worker: Worker) -> None:
        enabled = self._enabled.pop(worker.address, None)
        if enabled is not None:
            enabled.disable()
            scratch.release_memory()

    def __reduce__(self) -> tuple[Any, ...]:
        return _GpuReads, (self.strict,)
