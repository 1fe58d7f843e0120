"""Run the whole flow over ``--scheduler`` on machines that only a network and a folder join.

    python tests/cluster/two_machines.py [--tls] [--cut driver|other|none] [--cells N]

Machines are network namespaces of this host, joined by a virtual switch: a head with the
Prefect server, the Dask scheduler and the flow, and two with a worker each. Each has its own
loopback, host name, shared memory, home, temporary and working folder; one folder is seen by
all. So nothing works by accident that would not work between hosts. Needs root.

``--cut`` takes a worker's machine off the network in the middle of QC: the one whose worker
runs the stage, or the other one. The link comes back at the end.

Prints what happened, as JSON; ends with 1 where the flow failed, or its result differs from
that of this host alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anndata
import distributed
import numpy as np

from scgpu_tasks.datasets import write_synthetic

FLOW = Path(__file__).parents[2] / "flows" / "qc_pca.py"
HEAD, WORKERS = "scgpu-head", ("scgpu-one", "scgpu-two")
SWITCH = "scgpu-switch"
NETWORK = "10.77.31"
PORT, API_PORT = 8786, 4200
TLS = "DASK_DISTRIBUTED__COMM__TLS__"
OPTIONS = ("--device=cpu", "--min-genes=20", "--n-top-genes=300", "--n-comps=20")


def ip(*arguments: str) -> None:
    """Change the network."""
    subprocess.run(["ip", *arguments], check=True)


class Machines:
    """Namespaces on one switch, and the processes in them."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.processes: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Machines:
        self._stack.callback(self._remove)
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "switch", "up")
        for number, name in enumerate((HEAD, *WORKERS), 1):
            ip("netns", "add", name)
            pair = ("eth0", "netns", name, "type", "veth", "peer", "name", name)
            ip("-n", SWITCH, "link", "add", *pair)
            ip("-n", SWITCH, "link", "set", name, "master", "switch", "up")
            ip("-n", name, "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _remove(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in (HEAD, *WORKERS, SWITCH):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def start(self, name: str, *command: str) -> subprocess.Popen[str]:
        """Start a command on a machine; what it prints goes to a file of its own."""
        home = self.folder / name
        for part in ("home", "tmp", "work"):
            (home / part).mkdir(parents=True, exist_ok=True)
        for other in (HEAD, *WORKERS):
            (self.folder / other).mkdir(exist_ok=True)
        # Nothing of the other machines is seen.
        hidden = [str(self.folder / other) for other in (HEAD, *WORKERS) if other != name]
        mounts = [f"mount -t tmpfs tmpfs {path}" for path in ("/dev/shm", *hidden)]
        steps = [f"hostname {name}", *mounts, f"cd {home}/work", f"exec {shlex.join(command)}"]
        inside = " && ".join(steps)
        unshared = ["unshare", "--mount", "--uts", "--ipc", "sh", "-c", inside]
        log = self._stack.enter_context((home / f"log-{len(self.processes)}").open("w"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *unshared],
            env={
                **os.environ,
                **self.environment,
                "HOME": str(home / "home"),
                "TMPDIR": str(home / "tmp"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def link(self, name: str, state: str) -> None:
        """Take a machine off the network, or put it back."""
        ip("-n", SWITCH, "link", "set", name, state)


def certificates(folder: Path) -> dict[str, str]:
    """Dask's environment variables for certificates of an authority of their own."""
    made = distributed.Security.temporary()
    texts = {"ca": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for name, text in texts.items():
        (folder / name).write_text(text)
    found = {f"{TLS}CA_FILE": str(folder / "ca")}
    for role in ("CLIENT", "WORKER", "SCHEDULER"):
        found |= {f"{TLS}{role}__CERT": str(folder / "cert")}
        found |= {f"{TLS}{role}__KEY": str(folder / "key")}
    return found


def wait_for(condition: Any, seconds: float, what: str) -> float:
    """Wait until something holds; return how long it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            sys.exit(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)
    return round(time.monotonic() - start, 1)


def answers(namespace: str, url: str) -> bool:
    """Whether a server answers inside a namespace."""
    program = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=2)"
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def start_cluster(machines: Machines, protocol: str) -> str:
    """Start the Prefect server, the scheduler and a worker on each machine."""
    head = f"{NETWORK}.1"
    python = sys.executable
    server = f"http://{head}:{API_PORT}/api"
    machines.start(
        HEAD,
        python,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        head,
        "--port",
        str(API_PORT),
    )
    address = f"{protocol}://{head}:{PORT}"
    options = ["--protocol", protocol, "--no-dashboard"]
    scheduler = ["distributed.cli.dask_scheduler", "--host", head, "--port", str(PORT)]
    machines.start(HEAD, python, "-m", *scheduler, *options)
    for number, name in enumerate(WORKERS, 2):
        worker = ["distributed.cli.dask_worker", address, "--host", f"{NETWORK}.{number}"]
        limits = ["--nthreads", "1", "--memory-limit", "3GiB", "--name", name]
        machines.start(name, python, "-m", *worker, *limits, *options)
    wait_for(lambda: answers(HEAD, f"{server}/health"), 120, "the Prefect server")
    return address


def driver_of(out: Path) -> str | None:
    """Machine that runs the QC stage, once it has begun to: its process writes a draft."""
    for draft in out.glob(".work/qc/.draft-*"):
        for part in draft.name.split("-"):
            network = Path("/proc") / part / "ns" / "net"
            if part.isdigit() and network.exists():
                inode = network.stat().st_ino
                for name in WORKERS:
                    if Path("/run/netns", name).stat().st_ino == inode:
                        return name
    return None


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the store, run the flow there and here, compare."""
    shared = folder / "shared"
    shared.mkdir()
    store = write_synthetic(
        shared / "atlas.zarr", arguments.cells, 2_000, nnz_per_cell=200, n_types=4, seed=5
    )
    environment = certificates(folder) if arguments.tls else {}
    if not arguments.no_server:
        environment["PREFECT_API_URL"] = f"http://{NETWORK}.1:{API_PORT}/api"
    found: dict[str, Any] = {"cells": arguments.cells, "tls": arguments.tls}
    flow = [sys.executable, str(FLOW), "--store", str(store), "--chunks=200", *OPTIONS]
    with Machines(folder, environment) as machines:
        address = start_cluster(machines, "tls" if arguments.tls else "tcp")
        out = shared / "runs"
        start = time.monotonic()
        process = machines.start(HEAD, *flow, "--out", str(out), "--scheduler", address)
        if arguments.cut != "none":
            found |= cut(machines, arguments.cut, out, process)
        code = process.wait(arguments.timeout)
        found |= {"exit": code, "seconds": round(time.monotonic() - start, 1)}
        print((folder / HEAD / f"log-{len(machines.processes) - 1}").read_text(), flush=True)
        if code:
            return found | {"same_scores": False, "logs": logs(folder)}
        record = json.loads(max(out.glob("*/run.json")).read_text())
        found |= {"state": record["state"], "cluster": record["cluster"]}
        for part in ("stages", "summary"):
            found[part] = {
                stage: content.get("workers_lost", [])
                for stage, content in record[part].items()
            }
        if arguments.cut != "none":
            machines.link(found["cut"], "up")
            found["said_by_worker"] = said(machines, found["cut"])
        found["logs"] = logs(folder) if arguments.logs else {}
    alone = {n: v for n, v in os.environ.items() if n != "PREFECT_API_URL"}
    here = folder / "here"
    (folder / "home").mkdir()
    subprocess.run(
        [*flow, "--out", str(here)], check=True, env={**alone, "HOME": str(folder / "home")}
    )
    found["same_scores"] = bool(np.array_equal(scores(out), scores(here)))
    return found


def logs(folder: Path) -> dict[str, str]:
    """The end of what each process printed."""
    found = sorted(folder.glob("scgpu-*/log-*"))
    return {str(log.relative_to(folder)): log.read_text()[-3000:] for log in found}


def cut(machines: Machines, which: str, out: Path, process: Any) -> dict[str, Any]:
    """Cut a machine off in the middle of QC."""
    found: list[str] = []

    def begun() -> bool:
        if process.poll() is not None:
            sys.exit("the flow ended before it could be cut off")
        name = driver_of(out)
        found.extend([name] if name else [])
        return bool(name)

    wait_for(begun, 180, "QC")
    time.sleep(1.0)
    driver = found[0]
    (other,) = set(WORKERS) - {driver}
    name = driver if which == "driver" else other
    machines.link(name, "down")
    return {"driver": driver, "cut": name}


def said(machines: Machines, name: str) -> list[str]:
    """What the worker on a machine that was cut off printed last, once it can be reached."""
    time.sleep(20)
    (log,) = (machines.folder / name).glob("log-*")
    return log.read_text().splitlines()[-6:]


def scores(out: Path) -> Any:
    """Scores of the newest record."""
    newest = max(out.glob("*/results.zarr"), key=lambda path: path.stat().st_mtime)
    return anndata.read_zarr(newest).obsm["X_pca"]


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tls", action="store_true", help="encrypt with certificates")
    parser.add_argument("--cut", choices=("none", "driver", "other"), default="none")
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for the flow")
    parser.add_argument("--logs", action="store_true", help="show the logs of all processes")
    parser.add_argument(
        "--no-server", action="store_true", help="let the run start its own server, on loopback"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scgpu-machines-") as name:
        found = run(arguments, Path(name))
    logs = found.pop("logs")
    for path, text in logs.items():
        print(f"--- {path}\n{text}")
    print(json.dumps(found, indent=1))
    return int(found["exit"] != 0 or not found["same_scores"])


if __name__ == "__main__":
    sys.exit(main())
