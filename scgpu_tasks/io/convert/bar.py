"""A progress bar of a conversion in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scgpu_tasks.io.convert.progress import Progress


@contextmanager
def progress_bar(*, enabled: bool = True) -> Iterator[Callable[[Progress], None] | None]:
    """Show bytes, shards, rate and time left on standard error, where that is a terminal.

    Yields
    ------
    The function to give to ``convert_zarr`` as `progress`; None where nothing is shown.
    """
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[shards]}"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("converting", total=None, shards="")

        def show(state: Progress) -> None:
            shards = f"{state.done_shards}/{state.total_shards} shards"
            bar.update(task, completed=state.done_bytes, total=state.total_bytes, shards=shards)

        yield show
