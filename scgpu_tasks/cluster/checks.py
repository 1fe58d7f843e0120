"""What is looked at before a cluster is started, so that a mistake is told at once."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import ClusterError, MissingPackageError, OutputError, ParameterError

LOOPBACK = "127.0.0.1"


def resolve_security(security: Any) -> tuple[Any, bool]:
    """Security to hand on, and whether it asks for TLS; Dask's configuration may."""
    from distributed import Security

    if security is True:
        try:
            security = Security.temporary()
        except ImportError as error:
            msg = "security=True makes certificates with cryptography: pip install cryptography"
            raise MissingPackageError(msg) from error
    elif security is None:
        security = Security()
    return security, bool(getattr(security, "require_encryption", False))


def split_address(address: str) -> tuple[str, int]:
    """Take the host and port of a dashboard."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        msg = f"dashboard_address must end in a port, such as {LOOPBACK}:0, not {address!r}"
        raise ParameterError(msg)
    return host or LOOPBACK, int(port)


def require_free_port(host: str, port: int, option: str) -> None:
    """See that a server could listen there; port 0 stands for any."""
    if "://" in host:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "0 takes a free port" if port else "it must be an address of this machine"
            msg = (
                f"{option if port else 'host'}: cannot listen on {host}:{port} "
                f"({error.strerror}); {remedy}"
            )
            raise ClusterError(msg) from error


def require_local_directory(path: str | None) -> None:
    """See that workers can spill where they are told to."""
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        msg = (
            f"local_directory: workers cannot write to {path} ({error.strerror}); name a "
            "folder of yours, best on a local disk"
        )
        raise OutputError(msg) from error


def refuse_child() -> None:
    """Refuse to start processes from one that may not."""
    if not multiprocessing.current_process().daemon:
        return
    msg = (
        "this process is itself a worker of multiprocessing or Dask, which may not start "
        "processes. Start the cluster in the main process; inside a Dask task, the stages find "
        "the cluster that runs it, and need no other"
    )
    raise ClusterError(msg)


def refuse_unguarded_main() -> None:
    """Refuse to start a cluster from a script that a new process imports."""
    # multiprocessing sets this while a spawned process imports the script that started it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        msg = (
            "a cluster is being started while a worker process imports this script; put the "
            'work under `if __name__ == "__main__":`'
        )
        raise ClusterError(msg)


def last_line(error: BaseException) -> str:
    """Last line of what an error was caused by: libraries say there what went wrong."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[-1]
