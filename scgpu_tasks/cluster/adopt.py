"""Working on a Dask cluster that somebody else runs: join it, fit it out, leave it running."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from scgpu_tasks import __version__
from scgpu_tasks.cluster.checks import last_line
from scgpu_tasks.errors import ClusterError, ParameterError

if TYPE_CHECKING:
    import distributed

logger = logging.getLogger(__name__)

_PACKAGE = "scgpu_tasks"
_POLL_SECONDS = 0.2
_REACH_SECONDS = 5.0
_TLS = (
    "Dask reads certificates from its configuration or from the environment: "
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT and "
    "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY (the same with WORKER, and SCHEDULER, for those)"
)


def connect(
    scheduler: str,
    *,
    security: distributed.Security | None = None,
    timeout: float = 10.0,
    **options: Any,
) -> distributed.Client:
    """Client of a running scheduler, once its workers have our settings.

    Parameters
    ----------
    scheduler
        Its address: ``tcp://…``, ``tls://…``, ``ucx://…``.
    security
        For ``tls://``; by default what Dask's configuration says.
    timeout
        Seconds for an answer, and then for a first worker.
    **options
        Passed on to ``distributed.Client``.

    Returns
    -------
    The client.

    Raises
    ------
    ClusterError
        Nobody answers there within ``timeout`` seconds, it has no worker, or its workers cannot
        run what this process sends.
    """
    import distributed

    if scheduler.startswith("tls://"):
        _require_certificates(security)
    try:
        _require_answer(scheduler, security, timeout)
        client = distributed.Client(scheduler, security=security, timeout=timeout, **options)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        msg = (
            f"no Dask scheduler answers at {scheduler} ({last_line(error)}); "
            f"check the address{_tls_hint(scheduler)}, or leave --scheduler out to start a "
            "cluster here"
        )
        raise ClusterError(msg) from error
    try:
        client.wait_for_workers(1, timeout=timeout)
        fit_out(client)
    except TimeoutError as error:
        client.close()
        msg = f"the Dask scheduler at {scheduler} has no worker; start one with `dask worker`"
        raise ClusterError(msg) from error
    except BaseException:
        client.close()
        raise
    return client


def _require_answer(
    scheduler: str, security: distributed.Security | None, timeout: float
) -> None:
    """Greet a scheduler; Dask waits for ever for one that lets it in and says nothing."""
    import dask
    import distributed
    from distributed.comm import connect as greet

    if security is None and dask.config.get("distributed.client.security-loader", None):
        return  # Certificates of which only the client knows.
    tls = (security or distributed.Security()).get_connection_args("client")

    async def ask() -> None:
        # Dask ends in time, with its reason, where it does not get in at all.
        async with asyncio.timeout(timeout + 1):
            comm = await greet(scheduler, timeout=timeout, **tls)
            await comm.close()

    def wait() -> None:
        try:
            asyncio.run(ask())
        except TimeoutError:
            msg = f"no answer within {timeout:g} s"
            raise TimeoutError(msg) from None
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001
            # Dask takes the first bytes of anything for sizes.
            msg = f"what answers is no Dask scheduler: {type(error).__name__}"
            raise OSError(msg) from None

    # In a thread: the caller may have an event loop of its own, as notebooks do.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(wait).result()


def _require_certificates(security: distributed.Security | None) -> None:
    import distributed

    try:
        found = (security or distributed.Security()).get_tls_config_for_role("client")
    except (OSError, ValueError) as error:
        msg = f"the certificates for tls:// cannot be read: {error}. {_TLS}"
        raise ClusterError(msg) from error
    missing = [name for name in ("ca_file", "cert", "key") if not found.get(name)]
    if missing:
        msg = (
            f"tls:// needs certificates, and none are set for {', '.join(missing)}. {_TLS}; "
            "in Python, security=distributed.Security(...)"
        )
        raise ParameterError(msg)


def _tls_hint(scheduler: str) -> str:
    return (
        " and that its certificates are signed by the same authority"
        if scheduler.startswith("tls://")
        else ""
    )


def fit_out(client: distributed.Client) -> None:
    """Give the workers of a cluster our settings, those that join later too.

    What cannot be set is logged as a warning, and found again by `cluster_facts`.

    Raises
    ------
    ClusterError
        Workers lack this package, or run another Python.
    """
    _require_package(client)
    from scgpu_tasks.cluster.workers import WorkerSettings

    client.register_plugin(WorkerSettings(), name=WorkerSettings.name)
    found = cluster_facts(client)
    logger.info("Dask cluster at %s: %s", found["scheduler"], _describe(found))
    for sentence in found["amiss"]:
        logger.warning("not set on a worker: %s", sentence)


def cluster_facts(client: distributed.Client) -> dict[str, Any]:
    """Describe a running cluster, for a run record.

    Parameters
    ----------
    client
        Of the cluster; its workers have this package.

    Returns
    -------
    ``scheduler``, ``device``, ``workers`` (how many), ``threads`` and ``memory_limit`` (of all
    together), ``each`` (`scgpu_tasks.cluster.workers.facts` by address) and ``amiss`` (what
    could not be set, and where). JSON-able.
    """
    from scgpu_tasks.cluster.workers import facts

    scheduler: Any = client.scheduler
    each = {
        where: answer
        for where, answer in client.run(facts, on_error="return").items()
        if isinstance(answer, dict)
    }
    where_amiss: dict[str, list[str]] = {}
    for where, worker in each.items():
        for sentence in worker.pop("amiss"):
            where_amiss.setdefault(sentence, []).append(where)
    return {
        "scheduler": scheduler.address,
        "device": "gpu" if any("gpu" in worker for worker in each.values()) else "cpu",
        "workers": len(each),
        "threads": sum(worker["threads"] for worker in each.values()),
        "memory_limit": sum(worker["memory_limit"] or 0 for worker in each.values()),
        "each": each,
        "amiss": [f"{what} ({', '.join(at)})" for what, at in where_amiss.items()],
    }


def _describe(found: dict[str, Any]) -> str:
    hosts = len({worker["host"] for worker in found["each"].values()})
    gpus = sum("gpu" in worker for worker in found["each"].values())
    return (
        f"{found['workers']} workers on {hosts} machine{'s' * (hosts != 1)}, "
        f"{found['threads']} threads and {found['memory_limit'] / 2**30:.1f} GiB in all, "
        f"{gpus or 'no'} GPU{'s' * (gpus != 1)}"
    )


def _require_package(client: distributed.Client) -> None:
    """Compare what workers run with what this process runs."""
    versions: Any = client.get_versions()
    here = versions["client"]["packages"]["python"].split(".")[:2]
    pythons = {
        where: worker["packages"]["python"].split(".")[:2]
        for where, worker in versions["workers"].items()
    }
    other = [f"{where} ({'.'.join(p)})" for where, p in sorted(pythons.items()) if p != here]
    if other:
        msg = (
            f"Python differs between this process ({'.'.join(here)}) and the Dask workers at "
            f"{', '.join(other)}; use the same environment for both"
        )
        raise ClusterError(msg)

    # Nested, so that it travels by value to workers that lack the package.
    def version_of(name: str) -> str | None:
        from importlib import import_module

        try:
            return str(import_module(name).__version__)
        except ImportError:
            return None

    found = client.run(version_of, _PACKAGE)
    without = sorted(where for where, version in found.items() if version is None)
    if without:
        msg = (
            f"the Dask workers at {', '.join(without)} cannot import {_PACKAGE}: install "
            f"version {__version__} in their environment"
        )
        raise ClusterError(msg)
    for where, version in found.items():
        if version != __version__:
            logger.warning(
                "the Dask worker at %s has %s %s, this process %s: results may differ",
                where,
                _PACKAGE,
                version,
                __version__,
            )


def require_reach(client: distributed.Client, url: str) -> None:
    """See that all workers of a cluster reach a web server.

    Parameters
    ----------
    client
        Of the cluster.
    url
        Of a page that answers at once.

    Raises
    ------
    ClusterError
        Some do not.
    """
    answers = client.run(_reaches, url, on_error="return")
    without = sorted(where for where, answer in answers.items() if answer is False)
    if without:
        msg = (
            f"the Dask workers at {', '.join(without)} cannot reach the Prefect server at "
            f"{url}: start one that listens on an address that they see (prefect server start "
            "--host HOST) and set PREFECT_API_URL=http://HOST:4200/api"
        )
        raise ClusterError(msg)


async def _reaches(url: str) -> bool:
    return await asyncio.to_thread(_answers, url)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_REACH_SECONDS):  # noqa: S310
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def lost_workers(client: distributed.Client, since: float) -> list[dict[str, Any]]:
    """Workers that a scheduler lost without being asked to, from a moment on.

    Parameters
    ----------
    client
        Of the cluster.
    since
        ``time.time()`` of the moment.

    Returns
    -------
    For each ``worker``, its address; ``time``, seconds since 1970; ``tasks``, how many were
    under way on it. JSON-able.
    """
    return [
        {
            "worker": event["worker"],
            "time": round(float(moment), 3),
            "tasks": len(event["processing-tasks"]),
        }
        for moment, event in client.get_events("all")
        if moment >= since
        and isinstance(event, dict)
        and event.get("action") == "remove-worker"
        and not event.get("expected")
    ]


def stop_work(client: distributed.Client, timeout: float = 30.0) -> bool:
    """Cancel all that a client has asked of a cluster, and free what that held on GPUs.

    A stage that runs in a worker notices within about a second, and cancels its own tasks; a
    task that reads a block ends with it. The cluster itself, and the work of other clients,
    goes on.

    Parameters
    ----------
    client
        Whose work to stop.
    timeout
        Seconds to wait for the tasks to end.

    Returns
    -------
    Whether everything has ended in time.
    """
    import distributed

    client.cancel([distributed.Future(key, client) for key in list(client.futures)])
    deadline = time.monotonic() + timeout
    running = True
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        counts = client.run(_in_vain, on_error="return").values()
        running = any(isinstance(count, int) and count for count in counts)
    client.run(_free, on_error="return")
    return not running


def _in_vain(dask_worker: distributed.Worker) -> int:
    """Count the threads of a worker that are in a task that nobody waits for."""
    tasks = dask_worker.state.tasks
    found = (tasks.get(key) for key in list(dask_worker.active_threads.values()))
    return sum(task is None or task.state == "cancelled" for task in found)


def _free() -> None:
    """Drop what stages keep in this process from one task to the next."""
    from scgpu_tasks.stages import resident
    from scgpu_tasks.stages.short_memory import trim

    resident.drop()
    switch = sys.modules.get("scgpu_tasks.io.switch")
    if switch is not None:
        switch.release_memory()
    trim()
