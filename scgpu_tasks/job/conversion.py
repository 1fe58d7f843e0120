"""The convert step: a source becomes the store that the main job works on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scgpu_tasks.errors import OutputError, ParameterError, StoreError
from scgpu_tasks.job.steps import describe
from scgpu_tasks.job.workdir import StageFolder, WorkDir, stage_key

# Not a digest of our code: a store that was verified against its source stays right, and may
# have taken hours.
_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What to convert into which store; plain values, so that it travels as JSON.

    Parameters
    ----------
    source
        h5ad file or zarr store: path or URL.
    store
        Path of the store to write.
    work
        Folder of stage outputs.
    device
        Who compresses: as for `scgpu_tasks.io.convert_zarr`.
    """

    source: str
    store: str
    work: str
    device: Literal["auto", "cpu", "gpu"] = "auto"

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Conversion:
        """Rebuild from `to_json`."""
        return cls(**values)

    def key(self) -> str:
        """Name of the folder that says how the store was made from this source.

        Raises
        ------
        StoreError
            There is no such source.
        """
        from scgpu_tasks.io.source import source_stamp

        self.require_source()
        parts = [self.source, source_stamp(self.source), _spec().digest()]
        return stage_key("convert", self.store, parts, code=_VERSION)

    def require_source(self) -> None:
        """Refuse a path at which there is nothing.

        Raises
        ------
        StoreError
            There is no such source.
        """
        if "://" not in self.source and not Path(self.source).exists():
            msg = f"there is no source at {self.source} to convert; check the path"
            raise StoreError(msg)
        if self.source == self.store or (
            Path(self.store).exists()
            and "://" not in self.source
            and Path(self.store).samefile(self.source)
        ):
            msg = (
                f"{self.store} is both --source and --store; give the new store a path of its "
                "own, or leave --source out to use the store as it is"
            )
            raise ParameterError(msg)

    def made(self) -> StageFolder | None:
        """Note of this very conversion, if the store is still as it left it."""
        found = WorkDir(self.work).find("convert", self.key())
        if found is None or found.summary["store_stamp"] != _stamp(self.store):
            return None
        return found


def convert_step(
    job: Conversion,
    *,
    refresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Convert the source, unless the store holds just that already.

    A store at the same place is replaced when an earlier run made it from this source and
    nobody changed it since, or on ``refresh``; never otherwise.

    Raises
    ------
    OutputError
        Something else is at the store's place.
    StoreError, FormatError, CorruptChunkError
        As for `scgpu_tasks.io.convert.convert_zarr`.
    """
    from scgpu_tasks.io.convert import Progress, convert_zarr, is_current

    start = time.perf_counter()
    found = None if refresh else job.made()
    if found is not None:
        return describe(found, cached=True, seconds=time.perf_counter() - start)

    def report(state: Progress) -> None:
        if progress is not None:
            progress(state.done_shards, state.total_shards)

    # Once more when the new store is complete: that may be hours later.
    result = convert_zarr(
        job.source,
        job.store,
        spec=_spec(),
        overwrite=True if refresh else "untouched" if may_replace(job) else False,
        device=job.device,
        progress=report,
    )
    if not is_current(job.source, job.store, _spec()):
        msg = f"{job.source} was changed while it was converted; run again"
        raise StoreError(msg)
    work = WorkDir(job.work)
    with work.draft("convert") as draft:
        summary = {**result.to_json(), "store_stamp": _stamp(job.store)}
        done = draft.replace(job.key(), inputs=job.to_json(), summary=summary)
    return describe(done, cached=False, seconds=time.perf_counter() - start)


def may_replace(job: Conversion) -> bool:
    """Whether there is a store at the new one's place, of our making from the same source.

    Raises
    ------
    OutputError
        Something else is there.
    """
    from scgpu_tasks.io.convert import is_untouched

    if not Path(job.store).exists():
        return False
    if is_untouched(job.store, job.source):
        return True
    msg = (
        f"{job.store} exists, and is not what an earlier run made of {job.source}, or was "
        "changed since; leave --source out to use it as it is, name another --store, or let "
        "it be replaced with --refresh convert"
    )
    raise OutputError(msg)


def _spec() -> Any:
    from scgpu_tasks.io.convert import ConvertSpec

    # The later stages read rows.
    return ConvertSpec(csr=True)


def _stamp(store: str) -> str | None:
    from scgpu_tasks.io.source import source_stamp

    return source_stamp(store) if Path(store).exists() else None
