"""convert_zarr: any AnnData in, a store out that a GPU reads fast."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zarr

import scgpu_tasks
from scgpu_tasks.errors import OutputError, StoreError
from scgpu_tasks.io.convert import elements
from scgpu_tasks.io.convert.encode import encoder_version, file_crc32c
from scgpu_tasks.io.convert.execute import (
    Job,
    Meter,
    Progress,
    all_jobs,
    default_workers,
    do_job,
    run_threads,
    write_error,
)
from scgpu_tasks.io.convert.manifest import read_manifest, write_manifest
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.convert.plan import Plan, make_plan
from scgpu_tasks.io.convert.space import check_space
from scgpu_tasks.io.convert.values import Values, check_sparse
from scgpu_tasks.io.convert.work import WorkFolder, check_places, remove
from scgpu_tasks.io.source import Source, absolute, open_source, source_stamp


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion did.

    Attributes
    ----------
    path
        The finished store.
    source, source_form
        Where it came from, and what that is in words.
    source_stamp
        Changes when the source changes.
    shape
        Cells and genes.
    decoded_bytes, stored_bytes
        Size of the streamed arrays, decoded and on disk.
    shards, shards_reused
        Files of arrays, and how many of them an earlier, interrupted run had finished.
    verified
        Whether everything was read back and compared.
    seconds
        Wall time.
    notes
        What the user should know.
    """

    path: str
    source: str
    source_form: str
    source_stamp: str
    shape: tuple[int, int]
    decoded_bytes: int
    stored_bytes: int
    shards: int
    shards_reused: int
    verified: bool
    seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All fields, JSON-serialisable."""
        return asdict(self) | {"shape": list(self.shape), "notes": list(self.notes)}


def convert_zarr(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    spec: ConvertSpec | None = None,
    overwrite: bool = False,
    verify: bool = True,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ConvertResult:
    """Convert any AnnData into a zarr v3 store with zstd chunks in shards.

    Interrupted at any point, the same call goes on with what is missing; the finished store has
    the same bytes as one that was written without interruption.

    Parameters
    ----------
    src
        AnnData as zarr v2 or v3 (folder, zip, URL) or h5ad.
    dst
        Folder of the new store. It appears when it is complete; until then the work is done in
        a folder beside it whose name ends with ``.converting``.
    spec
        Chunk and shard sizes, zstd level, and what to change in the matrices.
    overwrite
        Replace an existing store at `dst`, once the new one is complete.
    verify
        Read every array back and compare it with the source.
    workers
        Number of threads; default: one per processor.
    progress
        Called after each shard.

    Raises
    ------
    StoreError
        The source is missing, unreadable, or changed during the conversion.
    FormatError
        The source is no AnnData, or holds something that zarr cannot.
    CorruptChunkError
        A chunk of the source does not decode, or what was written differs from the source.
    OutputError
        `dst` exists, is being written by another converter, or cannot be written.
    ParameterError
        `dst` is in `src` or the other way round.
    """
    spec = spec or ConvertSpec()
    begun = time.monotonic()
    target = Path(absolute(dst))
    check_places(absolute(src), target, overwrite=overwrite)
    with open_source(src) as source, WorkFolder(target) as work:
        conversion = _Conversion(source, work, spec, verify=verify)
        done = conversion.run(workers or default_workers(), progress)
        if source.stamp() != conversion.stamp:
            msg = (
                f"{source.path} changed while it was converted, so {target} was not made; run "
                "the same command again once nobody writes to the source"
            )
            raise StoreError(msg)
        try:
            work.publish(overwrite=overwrite)
        except OSError as error:
            if isinstance(error, OutputError):
                raise
            raise write_error(error, target) from error
        return ConvertResult(
            path=str(target),
            source=source.path,
            source_form=source.form,
            source_stamp=conversion.stamp,
            verified=verify,
            seconds=time.monotonic() - begun,
            notes=(*work.notes, *conversion.plan.notes),
            **done,
        )


def is_current(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], spec: ConvertSpec | None = None
) -> bool:
    """Whether `dst` is what converting `src` with these options would give."""
    manifest = read_manifest(absolute(dst))
    if manifest is None:
        return False
    wanted = (spec or ConvertSpec()).digest()
    same = manifest.get("options_digest") == wanted
    return bool(same and manifest.get("source_stamp") == source_stamp(src))


class _Conversion:
    """One source on its way into one work folder."""

    def __init__(
        self, source: Source, work: WorkFolder, spec: ConvertSpec, *, verify: bool
    ) -> None:
        self.source, self.work, self.spec, self.verify = source, work, spec, verify
        self.stamp = source.stamp()
        self.plan: Plan = make_plan(source, spec)
        self.values = Values(source, self.plan, work.scratch)
        for item in self.plan.sparse:
            check_sparse(self.values, item)

    def run(self, workers: int, progress: Callable[[Progress], None] | None) -> dict[str, Any]:
        """Write everything that is missing; the store is complete then, but for its name."""
        work = self.work
        key = {
            "source": self.source.path,
            "the source's content": self.stamp,
            "options": self.spec.to_json(),
            "encoder": encoder_version(),
            "scgpu_tasks": scgpu_tasks.__version__,
            "zarr": zarr.__version__,
        }
        jobs = all_jobs(self.values)
        try:
            resumed = work.begin(key)
            finished = self._finished() if resumed else {}
            check_space(
                self.values, [j for j in jobs if j.key not in finished], work, self.spec
            )
            remove(work.scratch)
            self._write_small(resumed)
            reused = [job for job in jobs if job.key in finished]
            finished |= self._write_arrays(jobs, reused, finished, workers, progress)
            shutil.rmtree(work.scratch, ignore_errors=True)
            self._finish(finished)
        except OSError as error:
            if hasattr(error, "message") or isinstance(error, OutputError | StoreError):
                raise
            raise write_error(error, work.root) from error
        lines = list(finished.values())
        obs, var = (self._length(name) for name in ("obs", "var"))
        return {
            "shape": (obs, var),
            "decoded_bytes": sum(line["decoded"] for line in lines),
            "stored_bytes": sum(line["size"] for line in lines),
            "shards": len(jobs),
            "shards_reused": len(reused),
        }

    def _length(self, name: str) -> int:
        node: Any = zarr.open_group(str(self.work.store), mode="r")[name]
        index = node[str(node.attrs["_index"])]
        return int((index if isinstance(index, zarr.Array) else index["values"]).shape[0])

    def _finished(self) -> dict[str, dict[str, Any]]:
        """Files of an earlier run that are there, with the bytes that were noted."""
        found = {}
        for line in self.work.journal():
            path = self.work.store / str(line.get("key"))
            if line.get("verified") is not True and self.verify:
                continue
            if path.is_file() and file_crc32c(path) == (line["size"], line["crc32c"]):
                found[line["key"]] = line
        return found

    def _write_small(self, resumed: bool) -> None:
        """Write groups, array metadata, strings and single elements; shards stay."""
        work, plan = self.work, self.plan
        if resumed and any(line.get("small") for line in work.journal()):
            return
        root = zarr.open_group(str(work.store), mode="a", zarr_format=3)
        elements.create_groups(root, plan)
        for item in plan.arrays:
            elements.create_array(root, item, self.spec.level)
        for path, at, attrs in plan.strings:
            elements.copy_strings(self.source, at, root, path, attrs, self.spec.level)
            if self.verify:
                elements.check_strings(self.source, at, root, path)
        for path, at in plan.elements:
            elements.copy_element(self.source, at, root, path)
        if plan.legacy:
            elements.copy_legacy(self.source, root, work.scratch_name())
        work.note({"small": True})

    def _write_arrays(
        self,
        jobs: list[Job],
        reused: list[Job],
        finished: dict[str, dict[str, Any]],
        workers: int,
        progress: Callable[[Progress], None] | None,
    ) -> dict[str, dict[str, Any]]:
        work = self.work
        missing = [job for job in jobs if job.key not in finished]
        meter = Meter(jobs, progress, reused)
        lock = threading.Lock()

        def one(job: Job) -> dict[str, Any]:
            with lock:
                scratch = work.scratch_name()
            return do_job(
                self.values,
                work.store,
                scratch,
                job,
                level=self.spec.level,
                verify=self.verify,
            )

        lines = {}
        for job, line in run_threads(missing, one, workers):
            work.note(line)
            lines[job.key] = line
            meter.add(job)
        return lines

    def _finish(self, lines: dict[str, dict[str, Any]]) -> None:
        """Write consolidated metadata and manifest; remove what an interruption left."""
        store = self.work.store
        for leftover in [*store.rglob("*.partial"), *store.rglob("*.__lock")]:
            remove(leftover)
        with elements.quiet():
            zarr.consolidate_metadata(str(store))
        shards = {
            key: {name: lines[key][name] for name in ("size", "crc32c")}
            for key in sorted(lines)
        }
        content = {
            "source": self.source.path,
            "source_form": self.source.form,
            "source_stamp": self.stamp,
            "options": self.spec.to_json(),
            "options_digest": self.spec.digest(),
            "encoder": encoder_version(),
            "scgpu_tasks": scgpu_tasks.__version__,
            "verified": self.verify,
            "shards": shards,
        }
        write_manifest(store, content)
