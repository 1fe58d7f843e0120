"""Start the processes of a cluster so that all of them run, or none is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from scgpu_tasks.cluster.checks import last_line
from scgpu_tasks.cluster.plan import ClusterPlan
from scgpu_tasks.errors import ClusterError

if TYPE_CHECKING:
    from distributed.deploy import Cluster

# Dask's own default is to wait for a worker for ever.
NO_WORKERS_SECONDS = 300
# Dask looks for a worker that died 15 s later, and gives it up for good if it is not there just
# then: on a busy machine it may still be starting, or be starting again. Nannies never give up.
LOST_WORKER_SECONDS = 365 * 24 * 3600
# So long an interrupted start is waited for, to be closed; then its processes are ended.
_INTERRUPTED_SECONDS = 15.0
# For mallopt(3). 32 MiB is the most that it takes for the first.
WORKER_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": 32 * 2**20, "MALLOC_TOP_PAD_": 64 * 2**20}


def launch(plan: ClusterPlan, settings: dict[str, Any], timeout: float) -> Cluster:
    """Start a cluster with all its workers, or leave no process of it.

    Parameters
    ----------
    plan
        What it is made of.
    settings
        Arguments of ``LocalCluster`` or ``LocalCUDACluster``.
    timeout
        Seconds that workers may take to start.

    Raises
    ------
    ClusterError
        It cannot start.
    """
    import dask

    # Before its settings are changed: it adds its own, which would go with the change.
    import distributed  # noqa: F401

    dask.config.update_defaults(
        {"distributed": {"deploy": {"lost-worker-timeout": f"{LOST_WORKER_SECONDS}s"}}}
    )
    # Nannies and workers are children of this process and inherit its environment; they are
    # as quiet as it is.
    with (
        dask.config.set(
            {
                "distributed.comm.timeouts.connect": f"{timeout:.0f}s",
                "distributed.scheduler.no-workers-timeout": f"{NO_WORKERS_SECONDS}s",
            }
            | _allocator_settings()
        ),
        _quiet_environment(),
    ):
        starting = _Starting(timeout)
        try:
            cluster = _whole_or_not(lambda: _cluster_class(plan)(**settings))
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            starting.end()
            raise ClusterError(_why_not(plan, error, starting)) from error
        except BaseException:
            starting.end()
            raise
        finally:
            starting.done()
    return cluster


def _whole_or_not(make: Callable[[], Cluster]) -> Cluster:
    """Make a cluster in a thread of its own, so that Ctrl-C finds it and can close it.

    In the main thread it would end the wait only: the event loop went on starting workers of a
    cluster that nobody has.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    pool = ThreadPoolExecutor(
        1, thread_name_prefix="scgpu-cluster", initializer=block_interrupts
    )
    begun = pool.submit(make)
    pool.shutdown(wait=False)
    try:
        return begun.result()
    except BaseException:
        if not begun.done():
            with contextlib.suppress(Exception):
                begun.result(_INTERRUPTED_SECONDS).close()
        raise


class _Starting:
    """The processes that start while a cluster does; ended where it takes them too long.

    Dask would wait for a worker that hangs, in a driver or a module it imports, for ever.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.late = False
        self._before = set(multiprocessing.active_children())
        self._timer = threading.Timer(timeout, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        self.late = True
        self.end()

    def end(self) -> None:
        """End them."""
        started = set(multiprocessing.active_children()) - self._before
        for process in started:
            process.kill()
        for process in started:
            process.join(5)

    def done(self) -> None:
        """Watch no longer."""
        self._timer.cancel()


def _why_not(plan: ClusterPlan, error: BaseException, starting: _Starting) -> str:
    if starting.late:
        reason = (
            f"its workers were not up within {starting.timeout:.0f} s; timeout= gives them "
            "longer, and local_directory= a faster disk than that of the temporary folder"
        )
    else:
        reason = (
            f"{last_line(error)}. What the workers say of it is above. A script that starts "
            'one needs `if __name__ == "__main__":` around its work, because every worker '
            "process imports the script again"
        )
    return f"the Dask cluster did not start ({plan}): {reason}"


def _allocator_settings() -> dict[str, int]:
    """Dask's settings that make the C library keep some freed memory for the next chunk.

    Dask's own setting for workers takes effect on memory only; with it, each decoded chunk is
    mapped anew and its pages are zeroed again, which doubles the processor time of reading.
    A variable of the same name in the environment comes first, as Dask has it.
    """
    environ = "distributed.nanny.pre-spawn-environ"
    return {f"{environ}.{name}": value for name, value in WORKER_ALLOCATOR.items()}


def _cluster_class(plan: ClusterPlan) -> Any:
    if plan.device == "cpu":
        from distributed import LocalCluster

        return LocalCluster
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """Environment of the workers: no log lines below warnings unless the user set it."""
    name = "DASK_LOGGING__DISTRIBUTED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "warning"
    try:
        yield
    finally:
        del os.environ[name]


def block_interrupts() -> None:
    """Keep Ctrl-C from processes that this thread and its threads start.

    They inherit its signal mask, and so are deaf to it before they load `WORKER_PRELOAD`.
    """
    # It unblocks the signal in the thread that starts it, which is that of the first process.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
