"""Conversion as a Prefect flow: one source, or all that are new or changed in a folder.

Run it from a shell with ``python flows/convert.py SRC DST``, or deploy
``flows/convert.py:atlas_convert`` with a schedule: sources that have not changed since are left
alone, and an interrupted conversion goes on where it was.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from scgpu_tasks.operate.form import AtLeast, OneOf


def atlas_convert(
    src: str,
    dst: str,
    overwrite: bool = False,
    verify: bool = True,
    csr: bool = False,
    sort_indices: bool = False,
    sum_duplicates: bool = False,
    data_dtype: str | None = None,
    chunk_bytes: int = 256 * 1024,
    shard_bytes: int = 128 * 1024 * 1024,
    level: Annotated[int, AtLeast(1)] = 3,
    workers: Annotated[int, AtLeast(1)] | None = None,
    device: Annotated[str, OneOf("auto", "cpu", "gpu")] = "auto",
    staging: str | None = None,
) -> list[dict[str, Any]]:
    """Convert AnnData sources into stores that a GPU reads fast.

    Args:
        src: A source (h5ad, zarr, zip, URL), a folder of sources, or a pattern: data/*.h5ad.
        dst: The new store; for several sources the folder of the new stores.
        overwrite: Convert again, and replace stores that are there.
        verify: Read everything back and compare it with the source.
        csr: Turn CSC matrices (X, raw/X, layers) into CSR.
        sort_indices: Sort the indices within each row.
        sum_duplicates: Sum values stored twice for one place.
        data_dtype: Type of the values of X, raw/X and layers; empty to leave them.
        chunk_bytes: Decoded size of a chunk.
        shard_bytes: Decoded size of a shard.
        level: zstd level.
        workers: Threads; by default one for each processor.
        device: Who compresses; auto takes a GPU where there is one and it pays.
        staging: Local folder for a store that goes to a URL.

    Returns
    -------
        What became of each source. A source that fails does not stop the others; the flow
        fails at the end.
    """
    from scgpu_tasks.errors import ScgpuError
    from scgpu_tasks.io.convert import ConvertSpec
    from scgpu_tasks.io.convert.many import match_sources, summary
    from scgpu_tasks.tasks import convert_source, report_conversions

    spec = ConvertSpec(
        csr=csr,
        sort_indices=sort_indices,
        sum_duplicates=sum_duplicates,
        data_dtype=data_dtype,
        chunk_bytes=chunk_bytes,
        shard_bytes=shard_bytes,
        level=level,
    )
    options = {
        "spec": spec.to_json(),
        "overwrite": overwrite,
        "verify": verify,
        "workers": workers,
        "device": device,
        "staging": staging,
    }
    results: list[dict[str, Any]] = []
    for source, store in match_sources(src, dst):
        state = convert_source(source, store, options, return_state=True)
        if state.is_completed():
            results.append(state.result())
            continue
        # Whatever it was that stopped this source, the others have their turn.
        error = state.result(raise_on_failure=False)
        failure = {"state": "failed", "source": source, "store": store}
        results.append(failure | {"error": f"{type(error).__name__}: {error}"})
    report_conversions(results)
    failed = sum(found["state"] == "failed" for found in results)
    if failed:
        msg = f"{failed} of {len(results)} sources failed:\n{summary(results)}"
        raise ScgpuError(msg)
    return results


def make_flow() -> Any:
    """Prefect flow of `atlas_convert`."""
    from prefect import flow

    return flow(name="atlas-convert", log_prints=False)(atlas_convert)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    import argparse

    from scgpu_tasks.__main__ import add_convert_options
    from scgpu_tasks.io.convert.many import summary
    from scgpu_tasks.job.commandline import run_flow

    parser = argparse.ArgumentParser(
        prog="convert.py",
        description="Convert AnnData sources that are new or changed into GPU-ready stores.",
        epilog="In brackets: the default.",
        allow_abbrev=False,
    )
    parser.add_argument("src", help="a source, a folder of sources, or a pattern")
    parser.add_argument("dst", help="the new store, or the folder of the new stores")
    add_convert_options(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks and logs")
    options = vars(parser.parse_args(arguments))
    options["verify"] = not options.pop("no_verify")
    given = {name: value for name, value in options.items() if value is not None}
    return run_flow(make_flow, given, lambda results: print(summary(results)))


if __name__ == "__main__":
    sys.exit(main())
elif __name__ != "__mp_main__":
    atlas_convert = make_flow()
