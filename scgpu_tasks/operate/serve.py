"""Prefect server, work pool, worker and deployments on this machine, for a first look.

``python -m scgpu_tasks.operate.serve``, or ``make serve``. All of it listens on loopback only,
ends with Ctrl-C or SIGTERM, and takes the runs that are in work with it. For every day run them
as services: deployments/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.job.server import API_URL, QUIET
from scgpu_tasks.operate.checkout import enter_checkout
from scgpu_tasks.operate.services import Service, adopt_orphans, end_orphans

HOST = "127.0.0.1"
POOL = "scgpu"
_PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
_STARTUP = 180.0
_PATIENCE = 20.0


class Stopped(Exception):  # noqa: N818 - no error
    """Somebody asked for the end."""


class _Serve:
    """What is running, in the order in which it was started."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.ui = f"http://{HOST}:{port}"
        self.api = f"{self.ui}/api"
        own = {
            API_URL: self.api,
            "PREFECT_SERVER_API_HOST": HOST,
            # The pages ask there, whatever --port says.
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_UI_API_URL": self.api,
        }
        os.environ.update(own)
        self.environment = {**QUIET, **os.environ}
        self.stop_asked = threading.Event()
        self._services: list[Service] = []

    def start(self) -> None:
        """Start everything; returns when runs can be asked for."""
        self._begin("server", "server", "start", "--log-level", "WARNING", quiet=True)
        self._wait_for_server()
        self._make_pool()
        self._begin("worker", "worker", "start", "--pool", POOL, "--name", "serve")
        self._deploy()

    def watch(self) -> None:
        """Return when the end was asked for.

        Raises
        ------
        ClusterError
            A service ended of itself.
        """
        while not self.stop_asked.wait(0.5):
            self._check()

    def stop(self) -> None:
        """Stop everything, the newest first."""
        for service in reversed(self._services):
            if service.name == "worker":
                # The worker waits for its runs, and tells the server how they ended.
                service.stop_children(_PATIENCE)
            service.stop(_PATIENCE)
            # While the server can still be told: the runs of a worker that was killed.
            end_orphans(self._services, _PATIENCE)

    def _begin(self, name: str, *arguments: str, quiet: bool = False) -> None:
        command = [*_PREFECT, *arguments]
        self._services.append(
            Service(name, command, self.environment, self.folder, quiet=quiet)
        )

    def _check(self) -> None:
        for service in self._services:
            code = service.ended()
            if code is not None:
                msg = f"the Prefect {service.name} ended with code {code}; see above"
                raise ClusterError(msg)
        if self.stop_asked.is_set():
            raise Stopped

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + _STARTUP
        while time.monotonic() < deadline:
            self._check()
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{self.api}/health", timeout=5),  # noqa: S310
            ):
                return
            self.stop_asked.wait(0.2)
        msg = f"the Prefect server did not answer at {self.api} within {_STARTUP:.0f} s"
        raise ClusterError(msg)

    def _make_pool(self) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import WorkPoolCreate
        from prefect.exceptions import ObjectAlreadyExists

        with (
            contextlib.suppress(ObjectAlreadyExists),
            get_client(sync_client=True) as client,
        ):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))

    def _deploy(self) -> None:
        done = subprocess.run(
            [*_PREFECT, "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            check=False,
        )
        if done.returncode:
            msg = f"the flows were not deployed:\n{done.stdout}{done.stderr}"
            raise ClusterError(msg)


@contextlib.contextmanager
def pointed_to(api: str, file: Path) -> Iterator[bool]:
    """Let commands that are given in a folder find a server, for as long as the block runs.

    Prefect reads the file ``.env`` of the folder in which it is started.

    Parameters
    ----------
    api
        Address of the server.
    file
        The file, which somebody else's is never replaced by.

    Yields
    ------
    Whether they find it: false where there is another ``.env``.
    """
    mark = "# Written by `make serve`, and removed when it ends.\n"
    if file.exists() and not file.read_text().startswith(mark):
        yield False
        return
    file.write_text(f"{mark}{API_URL}={api}\n")
    try:
        yield True
    finally:
        file.unlink(missing_ok=True)


def require_free(port: int) -> None:
    """Refuse a port of loopback that somebody listens on.

    Raises
    ------
    ClusterError
        With another port to name.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            msg = (
                f"port {port} is taken ({error.strerror}): by another Prefect server? Stop "
                "that, or name another port: make serve PORT=4201"
            )
            raise ClusterError(msg) from error


def _say_ready(serve: _Serve, *, found: bool) -> None:
    prefect = Path(sys.executable).with_name("prefect")
    shown = (
        prefect.relative_to(serve.folder) if prefect.is_relative_to(serve.folder) else prefect
    )
    lines = [
        "",
        f"Ready. Prefect's pages: {serve.ui}",
        "Deployed: atlas-qc, atlas-convert; their schedules are off. In another terminal:",
        "",
        f"  cd {quote(str(serve.folder))}",
        *([] if found else [f"  export {API_URL}={serve.api}"]),
        f"  {shown} deployment run atlas-qc --watch",
        f"  {shown} deployment run atlas-qc -p store=mine.zarr -p n_comps=30",
        "",
        "Ctrl-C here stops all of it.",
        "",
    ]
    print("\n".join(lines), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="serve",
        description="Start a Prefect server, a worker and the deployments on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--port", type=int, default=4200, help="of the server (%(default)s)")
    parser.add_argument("--env-file", type=Path, help="where to write the server's address")
    options = parser.parse_args(arguments)
    try:
        return _serve(options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _serve(options: Any) -> int:
    folder = Path(enter_checkout()["directory"])
    require_free(options.port)
    exported = os.environ.get(API_URL)
    serve = _Serve(folder, options.port)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: serve.stop_asked.set())
    print("Starting the Prefect server ...", flush=True)
    try:
        serve.start()
        with pointed_to(serve.api, options.env_file or folder / ".env") as found:
            known = exported == serve.api if exported else found
            _say_ready(serve, found=known)
            serve.watch()
    except Stopped:
        pass
    finally:
        print("Stopping ...", flush=True)
        serve.stop()
        print("Stopped.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
