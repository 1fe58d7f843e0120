"""Command lines of the flows: options, signals, messages and exit codes.

Nothing slow is imported at the top: worker processes import the script, and so this, again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.job.server import answering, end_without_server, prefect_api

EXIT_FAILED = 1

_MESSAGES: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "its terminal was closed",
}


class Terminated(BaseException):
    """SIGTERM arrived; an exception, so that everything is closed on the way out."""


def optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Option type that also takes the word ``none``."""

    def convert(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    convert.__name__ = kind.__name__
    return convert


def names(text: str) -> tuple[str, ...]:
    """Option type: names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Option type: whole numbers separated by commas."""
    return tuple(int(part) for part in names(text))


def chunk_size(text: str) -> int | str:
    """Option type: a number of cells, or ``auto``."""
    return "auto" if text == "auto" else int(text)


def parse_qc_pca(arguments: list[str] | None) -> dict[str, Any]:
    """Parameters of ``atlas-qc`` and ``debug`` from a command line."""
    parser = argparse.ArgumentParser(
        prog="qc_pca.py",
        description="Quality control, highly variable genes and PCA of a single-cell atlas.",
        epilog="In brackets: the default. 'none' switches a filter off. Each run leaves a "
        "record in OUT/<run name>.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--store", required=True, help="AnnData zarr store to work on, or to make of --source")
    add("--source", help="convert this (h5ad or zarr) into --store first")
    add("--out", default="runs", help="folder for run records (%(default)s)")
    add("--work", help="folder for finished stages, reused by later runs (.work inside --out)")
    add("--debug", "-v", action="store_true", help="show tracebacks and Prefect's log")
    _add_compute_options(parser)
    _add_filter_options(parser)
    _add_pca_options(parser)
    return vars(parser.parse_args(arguments))


def _add_compute_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where and how").add_argument
    add(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="what computes (%(default)s)",
    )
    add("--workers", type=int, help="worker processes (what suits the machine)")
    add("--scheduler", metavar="ADDRESS", help="use the Dask cluster of this scheduler")
    add("--chunks", type=chunk_size, default="auto", help="cells per block (%(default)s)")
    add(
        "--refresh",
        metavar="STAGE",
        choices=("convert", "check", "load", "qc", "pca"),
        help="recompute this stage and all after it: convert, check, load, qc or pca",
    )


def _add_filter_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("quality control").add_argument
    add("--layer", help="layer that holds the counts (X)")
    add(
        "--not-counts",
        dest="counts",
        action="store_false",
        default=True,
        help="do not insist on counts: whole numbers, 0 or more",
    )
    whole, real = optional(int), optional(float)
    shown = "(%(default)s)"
    add("--min-genes", type=whole, default=200, help=f"genes with counts, at least {shown}")
    add("--max-genes", type=whole, help="genes with counts, at most (none)")
    add("--min-counts", type=real, help="total counts of a cell, at least (none)")
    add("--max-counts", type=real, help="total counts of a cell, at most (none)")
    add(
        "--max-pct-mt",
        type=real,
        default=20.0,
        help="per cent mitochondrial counts of a cell, at most (20)",
    )
    add("--min-cells", type=whole, default=3, help=f"kept cells with a gene, at least {shown}")
    add(
        "--mad",
        action="store_true",
        help="remove cells far from the median, on either side, in place of the thresholds "
        "of cells above",
    )
    add(
        "--qc-vars",
        type=names,
        default=("mt",),
        metavar="A,B",
        help="gene sets to report on, separated by commas: mt, ribo, hb, or boolean columns of "
        "var (mt)",
    )
    add(
        "--percent-top",
        type=numbers,
        default=(),
        metavar="N,N",
        help="report the share of counts in that many top genes, such as 50,100 (none)",
    )


def _add_pca_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("genes and components").add_argument
    add(
        "--target-sum",
        type=optional(float),
        default=1e4,
        help="counts of a cell after normalisation; none: the median (10000)",
    )
    add(
        "--hvg-flavor",
        choices=("seurat", "cell_ranger", "seurat_v3"),
        default="seurat",
        help="how highly variable genes are chosen (%(default)s)",
    )
    add(
        "--n-top-genes",
        type=optional(int),
        default=2000,
        help="highly variable genes; none: by cutoffs (%(default)s)",
    )
    add("--batch-key", help="column of obs; genes are chosen within each batch (none)")
    add("--n-comps", type=int, default=50, help="principal components (%(default)s)")


def run_flow(
    make_flow: Callable[[], Any],
    options: Mapping[str, Any],
    show: Callable[[Any], None],
    cluster: Callable[[], Mapping[str, Any] | None] | None = None,
    refuse: Callable[[Mapping[str, Any]], None] | None = None,
) -> int:
    """Run a flow from a shell: server, signals, messages, exit code.

    Parameters
    ----------
    make_flow
        Returns the Prefect flow; called once a server is on its way, so that Prefect is
        imported meanwhile.
    options
        Parameters of the flow, and ``debug``.
    show
        Prints the summary of what the flow returned.
    cluster
        Returns the options of the cluster that the flow will ask for; it is started at once.
        None where the flow will ask for none.
    refuse
        Raises, before anything is started, what can be told from the parameters at once.

    Returns
    -------
    0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.
    """
    code = _run_to_end(make_flow, options, show, cluster, refuse)
    end_without_server(code)
    return code


def _run_to_end(
    make_flow: Callable[[], Any],
    options: Mapping[str, Any],
    show: Callable[[Any], None],
    cluster: Callable[[], Mapping[str, Any] | None] | None,
    refuse: Callable[[Mapping[str, Any]], None] | None,
) -> int:
    parameters = {name: value for name, value in options.items() if name != "debug"}
    debug = bool(options["debug"])
    _quiet(debug=debug)
    came: list[int] = []
    try:
        with _signals_raise() as came:
            if refuse is not None:
                refuse(parameters)
            try:
                result = _run(make_flow, parameters, cluster)
            except ClusterError as error:
                if refuse is not None:
                    _leave_record(parameters, error)
                raise
            show(result)
    except KeyboardInterrupt:
        came = came or [signal.SIGINT]
    except Terminated:
        came = came or [signal.SIGTERM]
    except Exception as error:  # noqa: BLE001 - the shell gets a message and a code
        done = None if came else _completed()
        if done is not None:
            # All that comes after the record is telling Prefect, and closing Dask's cluster.
            show(done)
            _say(f"note: the run is complete; {_what_came_after(error)}")
            return 0
        if not came:
            return _report(error, debug=debug)
    if came:
        _say_record()
        _say(
            f"{_how(came[0])}; run the same command again to go on after the last "
            "finished stage"
        )
        return 128 + came[0]
    return 0


def _run(
    make_flow: Callable[[], Any],
    parameters: Mapping[str, Any],
    cluster: Callable[[], Mapping[str, Any] | None] | None,
) -> Any:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(prefect_api())
        wanted = None if cluster is None else cluster()
        if not sys.stderr.isatty():
            # A terminal shows the stages' progress; a log would stay empty to the end.
            _say(f"starting Prefect{' and Dask' if wanted is not None else ''} ...")
        if wanted is not None:
            _begin_cluster(stack, wanted)
        flow = make_flow()
        from scgpu_tasks.flowrun import unattended, without_heartbeat

        if server is None:
            stack.enter_context(without_heartbeat())
        else:
            from scgpu_tasks.job.warm import FLOW_MODULES, RECORD_MODULES, import_modules

            import_modules(FLOW_MODULES)
            if wanted is not None:
                import_modules(RECORD_MODULES)
            server.wait()
            stack.enter_context(unattended())
        with answering():
            return flow(**parameters)


def _leave_record(parameters: Mapping[str, Any], error: Exception) -> None:
    """Leave a record of a run that did not come to write its own."""
    from scgpu_tasks.job.early import leave_record
    from scgpu_tasks.job.runlog import announced

    if announced() is None:
        leave_record(parameters, error)


def _report(error: Exception, *, debug: bool) -> int:
    from scgpu_tasks.job.runlog import describe_error

    if debug:
        traceback.print_exception(error)
    _say(f"error: {describe_error(error)}")
    _say_record()
    return EXIT_FAILED


def _what_came_after(error: Exception) -> str:
    from scgpu_tasks.job.runlog import describe_error

    if isinstance(error, TimeoutError):
        return "the Dask cluster did not close in time"
    return f"its end could not be told to the Prefect server ({describe_error(error)})"


def _completed() -> Mapping[str, Any] | None:
    """Return what the record of this process's run says, if the run came to its end."""
    from scgpu_tasks.job.runlog import announced
    from scgpu_tasks.records.run import read_run

    folder = announced()
    if folder is None:
        return None
    run = read_run(folder)
    return {**run, "record": str(folder)} if run["state"] == "completed" else None


def _say_record() -> None:
    from scgpu_tasks.job.runlog import announced

    folder = announced()
    if folder is not None:
        _say(f"record: {folder}/report.html")


def _begin_cluster(stack: contextlib.ExitStack, options: Mapping[str, Any]) -> None:
    from scgpu_tasks.cluster.start import prestart
    from scgpu_tasks.errors import ScgpuError

    # Whatever is wrong is said by the flow, which leaves a record.
    with contextlib.suppress(ScgpuError):
        stack.callback(prestart(**options))


def _how(number: int) -> str:
    flowrun = sys.modules.get("scgpu_tasks.flowrun")
    if flowrun is not None and flowrun.was_cancelled():
        return "cancelled on the Prefect server"
    return _MESSAGES[number]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(*, debug: bool) -> None:
    """Set what Prefect and Dask print, unless the user has; inherited by the workers."""
    defaults = {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO" if debug else "CRITICAL",
        "DASK_LOGGING__DISTRIBUTED": "info" if debug else "critical",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def _signals_raise() -> Iterator[list[int]]:
    """Turn signals into exceptions; yields the list of those that came.

    An exception that starts in the middle of somebody's serialiser may come out as another, so
    the list counts, not the exception. One that starts where Python drops exceptions, as in a
    callback of the garbage collector, is sent again.
    """
    came: list[int] = []

    def stop(number: int, _frame: object) -> None:
        came.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt | Terminated) and came:
            # Not here, where it would be dropped again.
            threading.Timer(0.02, os.kill, (os.getpid(), came[0])).start()
        else:
            sys.__unraisablehook__(what)

    # What is ignored stays so: `nohup` asks for that.
    heard = [n for n in _MESSAGES if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield came
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def show_record(result: Mapping[str, Any]) -> None:
    """Print what a run of ``atlas-qc`` found, and where its record is."""
    qc, pca, store = (
        result["summary"].get("qc", {}),
        result["summary"].get("pca", {}),
        result["store"],
    )
    stages = ", ".join(
        f"{name} {entry['state']}"
        + (f" {entry['seconds']:.1f} s" if entry["state"] == "computed" else "")
        for name, entry in result["stages"].items()
    )
    print(
        f"{result['name']}: {store['shape'][0]:,} cells, {store['shape'][1]:,} genes in "
        f"{store['path']}\n"
        f"  kept {qc['n_cells_kept']:,} cells and {qc['n_genes_kept']:,} genes; "
        f"{qc['n_hvg']:,} highly variable; {pca['n_comps']} components\n"
        f"  {stages}; {result['seconds']:.1f} s in all"
    )
    for note in qc.get("notes", ()):
        print(f"  note: {note}")
    print(f"  report: {result['record']}/report.html")
