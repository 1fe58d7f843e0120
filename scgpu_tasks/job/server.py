"""One temporary Prefect server for a run that has none, shared with its workers.

Left alone, Prefect starts a temporary server in the flow's process and another in every Dask
worker. Here the command line starts one, in parallel to its own imports, and hands its address
on through the environment. This module imports no Prefect: the server process does.

The server's standard input is a pipe from the process that started it. When that process ends,
in whatever way, the pipe closes and the server goes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from scgpu_tasks.errors import ClusterError

API_URL = "PREFECT_API_URL"
QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
"""Settings that keep Prefect from looking up anything outside."""

_AN_ERROR = re.compile(r"[\w.]*(Error|Exception)\b: ")
_UNREACHABLE = "Failed to reach API"
_temporary: TemporaryServer | None = None
_APP = "prefect.server.api.server:create_app"
_SETTINGS = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    # Into a file, of which the last is told where the server does not start.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
}


class TemporaryServer:
    """A Prefect API server on loopback that ends with this process.

    Parameters
    ----------
    startup_timeout
        Seconds it may take to answer.
    """

    def __init__(self, startup_timeout: float = 120.0) -> None:
        self._timeout = startup_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - open while the server is

    @property
    def api_url(self) -> str:
        """Value for PREFECT_API_URL."""
        return f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        """Start the process; `wait` until it answers."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            # Bound here and handed on, so that nobody else can take the port in between.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
                pass_fds=[listener.fileno()],
                # Ctrl-C is for the flow, which still has its end to report.
                start_new_session=True,
                env={**os.environ, **QUIET, **_SETTINGS},
            )

    def wait(self) -> None:
        """Wait until the server answers.

        Raises
        ------
        ClusterError
            It ended, or did not answer in time.
        """
        deadline = time.monotonic() + self._timeout
        while self._process is not None:
            code = self._process.poll()
            if code is not None:
                msg = (
                    f"the temporary Prefect server ended with code {code} ({self._why()}). Its "
                    f"database is {_home() / 'prefect.db'}, which a newer Prefect or a full "
                    "disk may have spoilt: set PREFECT_HOME to another folder, or start a "
                    "server with `prefect server start` and set PREFECT_API_URL"
                )
                raise ClusterError(msg)
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{self.api_url}/health", timeout=5),  # noqa: S310
            ):
                return
            if time.monotonic() > deadline:
                msg = (
                    f"the temporary Prefect server did not answer within {self._timeout:.0f} "
                    "s; start one with `prefect server start` and set PREFECT_API_URL"
                )
                raise ClusterError(msg)
            time.sleep(0.05)

    def has_ended(self) -> bool:
        """Whether the process has ended without being asked to."""
        return self._process is not None and self._process.poll() is not None

    def _why(self) -> str:
        """Return the last error among the server's messages."""
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").splitlines()
        errors = [line.strip() for line in lines if _AN_ERROR.match(line)]
        return errors[-1] if errors else "it said nothing"

    def stop(self) -> None:
        """End the process; harmless when it has ended."""
        self._messages.close()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextlib.contextmanager
def prefect_api() -> Iterator[TemporaryServer | None]:
    """Environment in which Prefect finds a server: the one configured, or a temporary one.

    Enter it before Prefect is imported, and call ``wait`` on the server before the flow runs.
    The server ends with the process, or with its ``stop``.

    Yields
    ------
    The temporary server, or None where one is configured.
    """
    with _environment({**QUIET, **_without_our_plugin()}):
        if server_configured():
            yield None
            return
        _keep_from_proxies("127.0.0.1")
        global _temporary
        _temporary = server = TemporaryServer()
        # Prefect sends its last events and log lines when the interpreter ends. Exit handlers
        # run in reverse, so this one, set before Prefect is imported, comes after that.
        atexit.register(server.stop)
        server.start()
        with _environment({API_URL: server.api_url}):
            yield server


def _keep_from_proxies(host: str) -> None:
    """Let this process and those that it starts reach a host of this machine directly."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [part for part in os.environ.get(name, "").split(",") if part]
        if host not in hosts and "*" not in hosts:
            os.environ[name] = ",".join([*hosts, host])


def end_without_server(code: int) -> None:
    """End this process at once if its temporary server has gone, and if not, do nothing.

    Prefect tries for minutes to send its last events, which nobody would read, when the
    interpreter ends.
    """
    if _temporary is not None and _temporary.has_ended():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _without_our_plugin() -> dict[str, str]:
    """Return what keeps Prefect from loading a plugin that only its own commands need.

    Dask workers import Prefect in an event loop, where it cannot load any, and says so at
    length. Other plugins, where the user allows some, are left to it.
    """
    try:
        settings = tomllib.loads(Path("prefect.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    ours = settings.get("plugins", {}).get("allow") == ["scgpu-tasks"]
    return {"PREFECT_PLUGINS_ENABLED": "false"} if ours else {}


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Say what to do where Prefect finds that its server does not answer.

    Raises
    ------
    ClusterError
        In place of Prefect's error.
    """
    try:
        yield
    except RuntimeError as error:
        if _UNREACHABLE not in str(error):
            raise
        msg = (
            f"no Prefect server answers where {API_URL} points ({error}); start that server or "
            f"correct the address, or unset {API_URL} (also in the Prefect profile) to let the "
            "run start a server of its own"
        )
        raise ClusterError(msg) from error


def server_configured() -> bool:
    """Whether Prefect would talk to a server that somebody runs.

    Importing Prefect takes more than a second, so it is asked only where one of the files that
    it reads could name a server.
    """
    if API_URL in os.environ:
        return bool(os.environ[API_URL])
    if not any(_mentions_server(path) for path in _settings_files()):
        return False
    from importlib import import_module

    setting = import_module("prefect.settings").PREFECT_API_URL
    return bool(setting.value())


def _settings_files() -> list[Path]:
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or _home() / "profiles.toml")
    here = Path.cwd()
    return [profiles, here / ".env", here / "prefect.toml", here / "pyproject.toml"]


def _home() -> Path:
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()


def _mentions_server(path: Path) -> bool:
    try:
        text = path.read_text(errors="replace").lower()
    except OSError:
        return False
    if path.name == "pyproject.toml" and "tool.prefect" not in text:
        return False
    return "url" in text


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, for as long as the block runs."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock would be held when the interpreter ends by itself.
    while os.read(0, 1):
        pass
    os._exit(0)


def _serve(descriptor: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import uvicorn

    config = uvicorn.Config(
        _APP, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    server.run(sockets=[socket.socket(fileno=descriptor)])
    if not server.started:
        sys.exit(3)  # as uvicorn's own command


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
