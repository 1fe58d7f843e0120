"""Command line: ``scgpu-tasks check``, ``convert``, ``runs`` and ``cache``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns
    -------
    Exit code: 0 all well, 1 an error or a store that is not GPU-ready, 2 wrong usage, 130
    interrupted.
    """
    from scgpu_tasks.errors import ScgpuError

    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output, such as head, has had enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ScgpuError as error:
        print(f"scgpu-tasks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scgpu-tasks: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scgpu-tasks",
        description="Out-of-core single-cell steps on CPUs and GPUs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check", help="say what keeps a store from being read fast", allow_abbrev=False
    )
    check.add_argument("path", help="zarr folder, zip, h5ad file, or a URL")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument(
        "--verify",
        action="store_true",
        help="compare every file of a converted store with the checksum in its manifest",
    )
    check.set_defaults(run=_check)
    convert = commands.add_parser(
        "convert",
        help="convert an AnnData store into one that a GPU reads fast",
        epilog="In brackets: the default.",
        allow_abbrev=False,
    )
    convert.add_argument("src", help="zarr v2 or v3 (folder, zip, URL) or h5ad")
    convert.add_argument("dst", help="the new zarr v3 store")
    add_convert_options(convert)
    convert.add_argument("--json", action="store_true", help="print the result as JSON")
    convert.set_defaults(run=_convert)
    _add_runs(commands)
    _add_cache(commands)
    return parser


def _add_runs(commands: Any) -> None:
    runs = commands.add_parser(
        "runs", help="list the records of runs, or compare two", allow_abbrev=False
    )
    add = runs.add_argument
    add("name", nargs="*", help="two runs to compare; none: list all")
    add("--out", default="runs", metavar="DIR", help="folder for run records (runs)")
    add("--store", metavar="PATH", help="only runs on this store")
    add("--state", metavar="STATE", help="only runs that are completed, failed, killed ...")
    add("--last", type=int, metavar="N", help="only the last N")
    add("--json", action="store_true", help="print JSON")
    runs.set_defaults(run=_runs)


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="list finished stages that later runs reuse, and remove some",
        description="Without --older-than, --keep or --all nothing is removed. What a run that "
        "goes on needs is never removed.",
        allow_abbrev=False,
    )
    add = cache.add_argument
    add("--work", metavar="DIR", help="folder of finished stages (OUT/.work)")
    add("--out", default="runs", metavar="DIR", help="folder for run records (runs)")
    add("--store", metavar="PATH", help="only stages of this store")
    add("--older-than", metavar="TIME", help="remove what was not used for so long: 12h, 30d")
    add("--keep", metavar="SIZE", help="remove what was unused for longest until SIZE is left")
    add("--all", action="store_true", help="remove everything, of --store where that is given")
    add("--dry-run", action="store_true", help="say what would be removed")
    add("--json", action="store_true", help="print JSON")
    cache.set_defaults(run=_cache)


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a conversion to a parser."""
    add = parser.add_argument
    add("--overwrite", action="store_true", help="replace DST once the new store is complete")
    add("--no-verify", action="store_true", help="do not read back and compare")
    add("--csr", action="store_true", help="turn CSC matrices (X, raw/X, layers) into CSR")
    add("--sort-indices", action="store_true", help="sort the indices within each row")
    add("--sum-duplicates", action="store_true", help="sum values stored twice for one place")
    add("--data-dtype", metavar="TYPE", help="type of X, raw/X and layers, such as float32")
    add("--chunk-bytes", type=int, metavar="N", help="decoded size of a chunk (262144)")
    add("--shard-bytes", type=int, metavar="N", help="decoded size of a shard (134217728)")
    add("--level", type=int, metavar="N", help="zstd level (3)")
    add("--staging", metavar="DIR", help="local folder for a store that goes to a URL")
    add("--workers", type=int, metavar="N", help="threads (one per processor)")
    add(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="who compresses (auto: a GPU where it pays)",
    )


def convert_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `add_convert_options` read, as arguments of ``convert_zarr``."""
    from scgpu_tasks.io.convert import ConvertSpec

    names = ("csr", "sort_indices", "sum_duplicates")
    chosen: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    for name in ("data_dtype", "chunk_bytes", "shard_bytes", "level"):
        if getattr(arguments, name) is not None:
            chosen[name] = getattr(arguments, name)
    return {
        "spec": ConvertSpec(**chosen),
        "overwrite": arguments.overwrite,
        "verify": not arguments.no_verify,
        "workers": arguments.workers,
        "device": arguments.device,
        "staging": Path(arguments.staging) if arguments.staging else None,
    }


def _check(arguments: argparse.Namespace) -> int:
    from scgpu_tasks.io.checks import check

    if arguments.verify:
        return _verify(arguments)
    report = check(arguments.path)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else report)
    return 0 if report.ok else 1


def _verify(arguments: argparse.Namespace) -> int:
    from scgpu_tasks.io.convert import verify_store

    found = verify_store(arguments.path)
    if arguments.json:
        print(json.dumps({"path": arguments.path, "differences": found}, indent=1))
    elif found:
        print(f"{arguments.path} is not as it was converted:", *found, sep="\n  ")
    else:
        print(f"{arguments.path}: every file is as it was converted")
    return 1 if found else 0


def _convert(arguments: argparse.Namespace) -> int:
    from scgpu_tasks.io.convert import convert_zarr
    from scgpu_tasks.io.convert.bar import progress_bar
    from scgpu_tasks.io.convert.many import summary

    with progress_bar(enabled=not arguments.json) as report:
        result = convert_zarr(
            arguments.src, arguments.dst, progress=report, **convert_options(arguments)
        )
    if arguments.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print(summary([{"state": "converted", "store": result.path} | result.to_json()]))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from scgpu_tasks.errors import ParameterError
    from scgpu_tasks.job import living
    from scgpu_tasks.records import listing

    out = Path(arguments.out)
    if arguments.name:
        if len(arguments.name) != 2:
            msg = f"name two runs to compare, not {len(arguments.name)}"
            raise ParameterError(msg)
        first, second = (
            living.as_it_is(listing.open_record(out, name)) for name in arguments.name
        )
        if arguments.json:
            print(json.dumps(listing.differences(first, second), indent=1))
        else:
            print(listing.compare_text(first, second))
        return 0
    found = [living.as_it_is(r) for r in listing.find_records(out, arguments.store)]
    if arguments.state is not None:
        found = [r for r in found if r.run["state"] == arguments.state]
    found = found[: arguments.last]
    if arguments.json:
        print(json.dumps([record.facts() for record in found], indent=1))
    else:
        print(listing.list_text(found))
    return 0


def _cache(arguments: argparse.Namespace) -> int:
    from scgpu_tasks.job import cache

    work = Path(arguments.work) if arguments.work else Path(arguments.out) / ".work"
    found = cache.entries(work)
    if arguments.store is not None:
        found = [e for e in found if cache.of_store(e, arguments.store)]
    wanted = arguments.all or arguments.older_than or arguments.keep
    gone = None
    if wanted:
        older = cache.seconds_of(arguments.older_than) if arguments.older_than else None
        keep = cache.bytes_of(arguments.keep) if arguments.keep else None
        gone = cache.choose(found, older_than=0.0 if arguments.all else older, keep_bytes=keep)
        if not arguments.dry_run:
            gone = cache.remove(gone)
    if arguments.json:
        listed = [entry.to_json() | {"removed": entry in (gone or [])} for entry in found]
        print(json.dumps(listed, indent=1))
    else:
        print(cache.list_text(found, gone, dry_run=arguments.dry_run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
