"""convert_zarr: any AnnData in, a store out that a GPU reads fast."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import zarr

import scgpu_tasks
from scgpu_tasks.errors import ScgpuError, StoreError
from scgpu_tasks.io.convert import elements
from scgpu_tasks.io.convert.audit import file_sums, list_files, require_untouched
from scgpu_tasks.io.convert.device import Device, encoder_of, require_device, use_gpu
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.convert.plan import make_plan
from scgpu_tasks.io.convert.prepare import check_matrices, prepare
from scgpu_tasks.io.convert.presence import require_files
from scgpu_tasks.io.convert.progress import Job, Meter, Progress, all_jobs
from scgpu_tasks.io.convert.remote import RemoteFolder
from scgpu_tasks.io.convert.rest import Rest
from scgpu_tasks.io.convert.runner import Runner, default_threads
from scgpu_tasks.io.convert.space import check_space, scratch_notes
from scgpu_tasks.io.convert.work import WorkFolder, remove
from scgpu_tasks.io.convert.worker import Task, Worker
from scgpu_tasks.io.manifest import file_crc32c, read_manifest, write_manifest
from scgpu_tasks.io.output import write_error
from scgpu_tasks.io.presence import names_array
from scgpu_tasks.io.source import (
    Source,
    absolute,
    is_url,
    open_source,
    reading,
    source_stamp,
)


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
    overwrite: bool | Literal["untouched"] = False,
    verify: bool = True,
    workers: int | None = None,
    device: Device = "auto",
    staging: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ConvertResult:
    """Convert any AnnData into a zarr v3 store with zstd chunks in shards.

    Column numbers are stored in the smallest type that holds them. anndata hands that type on,
    and some of scanpy's functions on matrices in memory want int32:
    ``scipy.sparse.csr_matrix((X.data, X.indices, X.indptr), X.shape)`` makes one they take.

    Interrupted at any point, the same call goes on with what is missing; the finished store has
    the same bytes as one that was written without interruption.

    Parameters
    ----------
    src
        AnnData as zarr v2 or v3 (folder, zip, URL) or h5ad.
    dst
        Folder of the new store. It appears when it is complete; until then the work is done in
        a folder beside it whose name ends with ``.converting``. Or a URL that fsspec can write
        to: the store is made on a local disk and uploaded then, root document last.
    spec
        Chunk and shard sizes, zstd level, and what to change in the matrices.
    overwrite
        Replace an existing store at `dst`, once the new one is complete. ``"untouched"``: only
        one on a file system that was converted from `src` and has not been changed since.
    verify
        Read every array back and compare it with the source.
    workers
        Number of threads; fewer work where so many would take more than half a GB. Default:
        the current Dask client's workers, if there is one, else a thread for each processor.
    device
        Who compresses. ``"gpu"``: nvCOMP does so for files of many chunks, for a third of the
        processor time and some 3 % more bytes. ``"auto"``: so, where there is a GPU (one in
        each Dask worker, where they do the work), the matrices have 20 GB and fewer than 12
        threads (of each worker) would work. ``"cpu"``: the processors do.
    staging
        Local folder for a store that goes to a URL; None: the system's temporary folder.
    progress
        Called after each shard.

    Returns
    -------
    Sizes, times, and whether the store was compared with its source.

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
        `dst` is in `src` or the other way round; `device` does not go with the level.
    MissingPackageError
        `device` is ``"gpu"``, and there is none, or CuPy or nvCOMP is missing.
    """
    spec = spec or ConvertSpec()
    require_device(device, spec)
    begun = time.monotonic()
    target = absolute(dst)
    if is_url(target):
        folder: WorkFolder = RemoteFolder(target, staging, verify=verify)
    else:
        folder = WorkFolder(Path(target))
    # What is not there now, or cannot be compared, is not to be replaced later either.
    only_untouched = overwrite == "untouched" and Path(target).exists()
    may = overwrite is True or only_untouched
    folder.check(absolute(src), overwrite=may or folder.was_published())
    if only_untouched:
        require_untouched(target, absolute(src))
    with open_source(src) as source, folder as work:
        with reading(source.path, "its metadata"):
            conversion = _Conversion(source, work, spec, workers, device, verify=verify)
        try:
            done = work.finish_earlier(conversion.key)
            if done is None:
                work.check(absolute(src), overwrite=may)
                done = conversion.run(progress)
                if conversion.source_has_changed():
                    raise conversion.change()
                if only_untouched:
                    require_untouched(target, absolute(src))
                work.note_end(done | {"shards_reused": done["shards"]})
                work.publish(overwrite=may)
        except Exception as error:
            # Half of an old file and half of a new one is no damage, whatever came of it. Where
            # the source cannot be asked either, the first error says more.
            changed = False
            with contextlib.suppress(Exception):
                changed = conversion.source_has_changed()
            if changed:
                raise conversion.change() from error
            if isinstance(error, OSError) and not isinstance(error, ScgpuError):
                raise write_error(error, target) from error
            raise
        return ConvertResult(
            path=str(target),
            source=source.path,
            source_form=source.form,
            source_stamp=conversion.stamp,
            verified=verify,
            seconds=time.monotonic() - begun,
            notes=(*work.notes, *conversion.values.plan.notes),
            **done,
        )


def is_current(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], spec: ConvertSpec | None = None
) -> bool:
    """Whether `dst` is what converting `src` with these options would give.

    Parameters
    ----------
    src, dst
        Source and store.
    spec
        The options. Default: ``ConvertSpec()``.

    Returns
    -------
    False also where there is no store, or no manifest in it.
    """
    manifest = read_manifest(absolute(dst))
    if manifest is None:
        return False
    wanted = (spec or ConvertSpec()).digest()
    same = manifest.get("options_digest") == wanted
    return bool(same and manifest.get("source_stamp") == source_stamp(src))


class _Conversion:
    """One source on its way into one work folder."""

    def __init__(
        self,
        source: Source,
        work: WorkFolder,
        spec: ConvertSpec,
        threads: int | None,
        device: str,
        *,
        verify: bool,
    ) -> None:
        self.source, self.work, self.spec, self.verify = source, work, spec, verify
        self.threads = threads
        self.stamp = source.stamp()
        plan = make_plan(source, spec)
        begun = work.begun().get("encoder")
        gpu = use_gpu(device, plan, spec, threads, default_threads(), begun)
        self.encoder = encoder_of(gpu=gpu)
        self.worker = Worker(
            Task(source.path, str(work.root), spec, verify, self.stamp, gpu), source, plan
        )
        self.values = self.worker.values
        require_files(self.values)
        check_matrices(self.values)

    @property
    def key(self) -> dict[str, Any]:
        """All that decides the bytes of the store."""
        return {
            "source": self.source.path,
            "the source's content": self.stamp,
            "options": self.spec.to_json() | {"verify": self.verify},
            "encoder": self.encoder,
            "scgpu_tasks": scgpu_tasks.__version__,
            "zarr": zarr.__version__,
        }

    def source_has_changed(self) -> bool:
        """Whether somebody wrote to the source, or removed it, meanwhile."""
        try:
            return self.source.stamp() != self.stamp
        except FileNotFoundError:
            return True

    def change(self) -> StoreError:
        """Return the error that tells of it."""
        msg = (
            f"{self.source.path} changed, or was removed, while it was converted, so "
            f"{self.work.target} was not made; run the same command again once nobody writes "
            "to the source"
        )
        return StoreError(msg)

    def run(self, progress: Callable[[Progress], None] | None) -> dict[str, Any]:
        """Write everything that is missing; the store is complete then, but for its name."""
        work = self.work
        self.rest = Rest(work, self.values.plan, begun=work.begin(self.key))
        finished = self._finished() if "small" in self.rest.there else {}
        self.values.update_plan()
        jobs = [job for job in all_jobs(self.values.plan) if job.key not in finished]
        check_space(self.values, jobs, work, self.spec)
        work.notes += scratch_notes(self.values)
        if self.worker.task.gpu:
            work.notes.append("a GPU compressed the large arrays, by nvCOMP")
        remove(work.scratch)
        if "small" not in self.rest.there:
            remove(work.store)
            work.store.mkdir()
        with Runner(self.worker, self.threads) as runner:
            prepare(runner)
            jobs = all_jobs(self.values.plan)
            reused = sum(job.key in finished for job in jobs)
            finished |= self._write(runner, jobs, finished, progress)
        self._finish(finished)
        lines = list(finished.values())
        return {
            "shape": (self._length("obs"), self._length("var")),
            "decoded_bytes": sum(line["decoded"] for line in lines),
            "stored_bytes": sum(line["size"] for line in lines),
            "shards": len(jobs),
            "shards_reused": reused,
        }

    def _length(self, name: str) -> int:
        node: Any = zarr.open_group(str(self.work.store), mode="r")[name]
        return int(names_array(node[str(node.attrs["_index"])]).shape[0])

    def _finished(self) -> dict[str, dict[str, Any]]:
        """Files of an earlier run that are there, with the bytes that were noted."""
        found = {}
        for line in self.work.journal():
            if "key" not in line:
                continue
            path = self.work.store / line["key"]
            if path.is_file() and file_crc32c(path) == (line["size"], line["crc32c"]):
                found[line["key"]] = line
        return found

    def _write_small(self) -> None:
        """Write groups, array metadata and single elements, if they are not there."""
        work, plan = self.work, self.values.plan
        if "small" in self.rest.there:
            return
        root = zarr.open_group(str(work.store), mode="a", zarr_format=3)
        elements.create_groups(root, plan)
        for item in plan.arrays:
            elements.create_array(root, item, self.spec.level)
        for path, at, attrs in plan.strings:
            elements.create_strings(self.source, at, root, path, attrs, self.spec.level)
        for path, at in plan.elements:
            elements.copy_element(self.source, at, root, path)
            if self.verify:
                elements.check_element(self.source, at, root, path)
        if plan.legacy:
            scratch = work.scratch_name()
            elements.copy_legacy(self.source, root, scratch, verify=self.verify)
        self.rest.note("small")

    def _write_strings(self) -> None:
        work, plan = self.work, self.values.plan
        if "strings" in self.rest.there:
            return
        before = list_files(work.store)
        root = zarr.open_group(str(work.store), mode="a", zarr_format=3)
        for path, at, _ in plan.strings:
            elements.copy_strings(self.source, at, root, path, self.spec.level)
            if self.verify:
                elements.check_strings(self.source, at, root, path)
        self.rest.note("strings", before)

    def _write(
        self,
        runner: Runner,
        jobs: list[Job],
        finished: dict[str, dict[str, Any]],
        progress: Callable[[Progress], None] | None,
    ) -> dict[str, dict[str, Any]]:
        """Write what is missing of the arrays, and all else beside them."""
        missing = [job for job in jobs if job.key not in finished]
        meter = Meter(jobs, progress, [job for job in jobs if job.key in finished])
        if runner.on_cluster:
            self._write_small()
        described, lines = self.worker.described, {}
        described.clear()
        with runner.writing(missing, "prepared") as written:
            try:
                # In this thread: it changes the filters of warnings, which all threads share.
                self._write_small()
            finally:
                described.set()
            # The interpreter handles strings one by one, which is not to keep others waiting.
            with ThreadPoolExecutor(1, thread_name_prefix="convert") as pool:
                strings = pool.submit(self._write_strings)
                for job, line in written:
                    self.work.note(line)
                    lines[job.key] = line
                    meter.add(job)
                    if strings.done():
                        strings.result()
                strings.result()
        return lines

    def _finish(self, lines: dict[str, dict[str, Any]]) -> None:
        """Write consolidated metadata and manifest; remove what an interruption left."""
        store = self.work.store
        for leftover in [*store.rglob("*.partial"), *store.rglob("*.__lock")]:
            # A folder of such a name is an element of the source.
            if leftover.is_file():
                leftover.unlink()
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
            "encoder": self.encoder,
            "scgpu_tasks": scgpu_tasks.__version__,
            "verified": self.verify,
            "shards": shards,
            "files": file_sums(store, sorted(list_files(store).keys() - shards.keys())),
        }
        write_manifest(store, content)
