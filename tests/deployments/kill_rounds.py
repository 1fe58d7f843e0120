"""Kills Prefect's worker at random moments of a run, and looks whether the next one is right.

Run it with ``python -m tests.deployments.kill_rounds --rounds 5``. In each round everything is
served afresh, a run is asked for, and SIGKILL hits the worker at some moment. Then

- serving ends with an error, and no process of it is left;
- served again, the next run completes with the right numbers, takes over every stage that was
  finished, and need not wait for the killed one;
- nothing, neither record nor server, says that the killed run is still running.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from scgpu_tasks.datasets import write_synthetic
from tests.deployments.conftest import Operator
from tests.deployments.test_operated import FINAL, identity
from tests.flows.kill_rounds import STAGES, finished, numbers, require, stage_of

OPTIONS = {
    "device": "cpu",
    "min_genes": 20,
    "n_top_genes": 200,
    "n_comps": 20,
    "chunks": 200,
    "workers": 1,
}


def worker(operator: Operator) -> psutil.Process:
    """Return the process of Prefect's worker."""
    command = ["worker", "start"]
    (found,) = [p for p in operator.processes() if p.cmdline()[4:6] == command]
    return found


def ask(operator: Operator, store: Path, out: Path, *more: str) -> Any:
    """Ask for a run of atlas-qc."""
    given = [f"{name}={value}" for name, value in OPTIONS.items()]
    given += [f"store={store}", f"out={out}"]
    parameters = [word for one in given for word in ("-p", one)]
    return operator.prefect("deployment", "run", "atlas-qc", *parameters, *more)


def play(folder: Path, store: Path, draw: random.Random, expected: dict[str, Any]) -> str:
    """Play one round; return what happened in a line."""
    folder.mkdir()
    out = folder / "runs"
    first = Operator(folder)
    first.serve()
    killed = identity(ask(first, store, out))
    time.sleep(draw.uniform(0.5, 14))
    stage = stage_of(out)
    worker(first).kill()
    code = first.ended(120)
    require(code == 1, f"serving ended with code {code}")
    require(not first.processes(), f"left over: {first.processes()}")
    before = finished(out)

    again = Operator(folder)
    again.serve()
    try:
        began = time.monotonic()
        run = again.run(identity(ask(again, store, out, "--watch")))
        seconds = time.monotonic() - began
        require(run["state_type"] == "COMPLETED", f"{run['state']}\n{again.log()}")
        records = {r["run_id"]: r for r in again.records(out)}
        record = records[run["id"]]
        require(numbers(record) == expected, f"{numbers(record)} != {expected}")
        cached = {n for n, e in record["stages"].items() if e["state"] == "cached"}
        require(before & set(STAGES) <= cached, f"finished {before}, taken over {cached}")
        states = [r["state"] for r in records.values()]
        require("running" not in states, f"a record says running: {states}")
        was = again.run(killed)["state"]
        require(was["type"] in FINAL, f"the killed run is {was}")
    finally:
        code = again.stop()
    require(code == 0, f"stopped with code {code}")
    require(not again.processes(), f"left over: {again.processes()}")
    shutil.rmtree(folder)
    return (
        f"in {stage}: {was['name']} ({str(was['message'])[:60]}); next took {seconds:.0f} s, "
        f"took over {', '.join(s for s in STAGES if s in before) or 'nothing'}"
    )


def reference(folder: Path, store: Path) -> dict[str, Any]:
    """Return the numbers of a run that nothing disturbs."""
    folder.mkdir()
    operator = Operator(folder)
    operator.serve()
    try:
        ask(operator, store, folder / "runs", "--watch")
        (record,) = operator.records(folder / "runs")
        return numbers(record)
    finally:
        operator.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, failures = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory(prefix="worker-rounds-") as name:
        store = write_synthetic(
            Path(name) / "long.zarr", 40_000, 800, nnz_per_cell=150, n_types=3, seed=7
        )
        expected = reference(Path(name) / "reference", store)
        for number in range(1, arguments.rounds + 1):
            began = time.monotonic()
            try:
                text = play(Path(name) / f"round{number}", store, draw, expected)
            except RuntimeError as error:
                failures += 1
                text = f"FAILED: {error}"
            print(f"{number:3d} ({time.monotonic() - began:.0f} s) {text}", flush=True)
    print(f"{failures} of {arguments.rounds} rounds failed")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
