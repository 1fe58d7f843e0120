"""Kills parts of a run at random moments, and looks whether the next run ends right.

Run it with ``python -m tests.flows.kill_rounds --rounds 20``. In each round a run is started on
a fresh folder of finished stages; after a random time SIGKILL hits the flow, its temporary
Prefect server or a Dask worker, or the store or the finished stages are tampered with. Then

- no process of that run is left within 20 seconds;
- the next run completes with the right numbers, and takes over every stage that was finished;
- the record of a killed run says so, and no half-written stage is left, nor, where the next run
  started Dask, a spill folder.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from scgpu_tasks.datasets import write_synthetic
from tests.flows.conftest import CommandLine

STAGES = ("check", "load", "qc", "pca")
SLOW = ("--chunks=200", "--workers=1")
SECONDS_TO_END = 240


def flow(shell: CommandLine, pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid)]


def server(shell: CommandLine, pid: int) -> list[psutil.Process]:
    return [p for p in shell.processes() if "scgpu_tasks.job.server" in p.cmdline()]


def dask_worker(shell: CommandLine, pid: int) -> list[psutil.Process]:
    return [p for p in shell.processes() if "spawn_main" in " ".join(p.cmdline())]


def finished(out: Path) -> set[str]:
    """Stages whose output is complete."""
    found = out.glob(".work/*/*/manifest.json")
    return {p.parents[1].name for p in found if not p.parent.name.startswith(".")}


def touch_a_chunk(store: Path, out: Path) -> None:
    """Write a chunk of the store again, as it is."""
    chunk = max(p for p in (store / "X" / "data" / "c").rglob("*") if p.is_file())
    chunk.write_bytes(chunk.read_bytes())


def damage_the_cache(store: Path, out: Path) -> None:
    """Overwrite the first bytes of every file of every finished stage."""
    for path in out.glob(".work/*/*/*"):
        if path.is_file() and not path.parent.name.startswith("."):
            with path.open("r+b") as file:
                file.write(b"damaged!")


def delete_the_cache(store: Path, out: Path) -> None:
    """Remove the folder of finished stages."""
    shutil.rmtree(out / ".work", ignore_errors=True)


VICTIMS: dict[str, Callable[..., list[psutil.Process]]] = {
    "flow": flow,
    "server": server,
    "Dask worker": dask_worker,
}
TAMPERING: dict[str, Callable[[Path, Path], None]] = {
    "a chunk of the store": touch_a_chunk,
    "cache damaged": damage_the_cache,
    "cache deleted": delete_the_cache,
}


class Rounds:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.store = write_synthetic(
            folder / "long.zarr", 40_000, 800, nnz_per_cell=150, n_types=3, seed=7
        )
        self.home = folder / "prefect-home"
        shell = self.shell(folder / "reference")
        began = time.monotonic()
        done = shell.run("--store", str(self.store), *SLOW)
        self.seconds = time.monotonic() - began
        require(done.returncode == 0, done.stderr)
        self.expected = numbers(shell.record())

    def shell(self, folder: Path) -> CommandLine:
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        return CommandLine(folder, {"PREFECT_HOME": str(self.home), "TMPDIR": str(temporary)})

    def play(self, number: int, what: str) -> str:
        """Play one round; return what happened in a line."""
        shell = self.shell(self.folder / f"round{number}")
        run = shell.start("--store", str(self.store), *SLOW)
        time.sleep(self.draw.uniform(0.1, 0.9) * self.seconds)
        stage = stage_of(shell.out)
        self.strike(what, shell, run.pid)
        try:
            _, err = run.communicate(timeout=SECONDS_TO_END)
        finally:
            run.kill()
        left = shell.left_over()
        require(not left, f"left over after the first run: {left}")
        before = finished(shell.out)
        again = shell.run("--store", str(self.store), *SLOW)
        require(again.returncode == 0, again.stderr)
        record = shell.record()
        require(numbers(record) == self.expected, f"{numbers(record)} != {self.expected}")
        if what in VICTIMS:
            cached = {n for n, e in record["stages"].items() if e["state"] == "cached"}
            require(before & set(STAGES) <= cached, f"finished {before}, taken over {cached}")
        states = [json.loads(p.read_text())["state"] for p in shell.out.glob("*/run.json")]
        require("running" not in states, f"a record says running: {states}")
        require(not shell.left_over(), f"left over after the next run: {shell.left_over()}")
        drafts = list(shell.out.glob(".work/*/.draft-*")) + list(shell.out.glob("*/.running"))
        require(not drafts, f"half-written: {drafts}")
        spilled = [p for p in (shell.folder / "tmp").glob("dask-scratch-space/*") if p.is_dir()]
        # Dask clears away what killed workers left when it starts; a run that copies its record
        # does not start it.
        require(not spilled or "cluster" not in record, f"spill folders: {spilled}")
        shutil.rmtree(shell.folder)
        last = err.strip().splitlines()[-1][:90] if err.strip() else ""
        return (
            f"{what} in {stage}: code {run.returncode} ({last}); next run took over "
            f"{', '.join(s for s in STAGES if s in before) or 'nothing'}"
        )

    def strike(self, what: str, shell: CommandLine, pid: int) -> None:
        if what in TAMPERING:
            TAMPERING[what](self.store, shell.out)
            return
        # A round may come before its victim has started, or after it has ended.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and psutil.pid_exists(pid):
            for victim in VICTIMS[what](shell, pid):
                victim.send_signal(signal.SIGKILL)
                return
            time.sleep(0.1)


def stage_of(out: Path) -> str:
    """Return the stage that runs, as the record says."""
    for path in out.glob("*/run.json"):
        stages = json.loads(path.read_text())["stages"]
        for name, entry in stages.items():
            if entry["state"] == "running":
                return name
        return "its record" if stages["pca"]["state"] != "pending" else "the start"
    return "the start"


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same in every run."""
    qc, pca = record["summary"]["qc"], record["summary"]["pca"]
    found = {name: qc[name] for name in ("n_cells_kept", "n_genes_kept", "n_hvg", "lost")}
    return found | {"variance_explained": pca["variance_explained"]}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one of the things that can happen")
    arguments = parser.parse_args()
    whats = [arguments.only] if arguments.only else [*VICTIMS, *TAMPERING]
    failures = 0
    with tempfile.TemporaryDirectory(prefix="kill-rounds-") as name:
        rounds = Rounds(Path(name), arguments.seed)
        print(f"a run takes {rounds.seconds:.0f} s: {rounds.expected}", flush=True)
        for number in range(arguments.rounds):
            what = whats[number % len(whats)]
            began = time.monotonic()
            try:
                text = rounds.play(number, what)
            except RuntimeError as error:
                failures += 1
                text = f"{what}: FAILED: {error}"
            print(f"{number + 1:3d} ({time.monotonic() - began:.0f} s) {text}", flush=True)
    print(f"{failures} of {arguments.rounds} rounds failed")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
