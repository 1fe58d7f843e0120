"""Who compresses: the processors, or a GPU where that is faster."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

from scgpu_tasks.errors import MissingPackageError, ParameterError
from scgpu_tasks.io.clients import current_client
from scgpu_tasks.io.convert.compress import encoder_version
from scgpu_tasks.io.convert.gpu_compress import NVCOMP, fits, gpu_encoder_version, suits
from scgpu_tasks.io.convert.options import LEVEL, ConvertSpec
from scgpu_tasks.io.convert.plan import Plan

Device = Literal["auto", "cpu", "gpu"]

# Loading CUDA, and the first call of everything, take seconds.
_LEAST_BYTES = 20_000_000_000
# Measured: with four threads a GPU takes 0.4 of the time; with 16 as long as they, or longer.
_MANY_THREADS = 12


def encoder_of(*, gpu: bool) -> str:
    """Name of what decides the stored bytes of equal values.

    Raises
    ------
    MissingPackageError
        There is no GPU, or CuPy or nvCOMP is missing.
    """
    host = encoder_version()
    return f"{host}; {gpu_encoder_version()}" if gpu else host


def require_device(device: str, spec: ConvertSpec) -> None:
    """Refuse a choice that cannot be kept to.

    Raises
    ------
    ParameterError
        It is none of ``"auto"``, ``"cpu"`` and ``"gpu"``; or a level was asked for, which
        nvCOMP does not have.
    MissingPackageError
        A GPU was asked for, and cannot be used.
    """
    if device not in ("auto", "cpu", "gpu"):
        msg = f"device must be auto, cpu or gpu, not {device!r}"
        raise ParameterError(msg)
    if device == "gpu" and spec.level != LEVEL:
        msg = (
            f"nvCOMP has no levels, so level={spec.level} and device='gpu' do not go together: "
            f"leave the level at {LEVEL}, or let the processors compress (device='cpu')"
        )
        raise ParameterError(msg)
    if device == "gpu":
        try:
            gpu_encoder_version()
        except MissingPackageError as error:
            msg = f"compressing on a GPU is not possible here: {error}; or choose device='cpu'"
            raise MissingPackageError(msg) from error


def use_gpu(
    device: str,
    plan: Plan,
    spec: ConvertSpec,
    threads: int | None,
    default_threads: int,
    begun: str | None,
) -> bool:
    """Decide whether a GPU compresses the large files of a conversion.

    Parameters
    ----------
    device
        One that `require_device` has let pass.
    plan, spec
        Of the conversion.
    threads, default_threads
        That the caller asks for, and that would work on this machine.
    begun
        Encoder of an earlier run that was interrupted: what it began is gone on with.
    """
    if device == "gpu":
        return True
    if device == "cpu" or spec.level != LEVEL:
        return False
    large = [item.layout for item in plan.arrays if suits(item.layout)]
    if not large or begun == encoder_of(gpu=False):
        return False
    enough = sum(layout.nbytes for layout in large) >= _LEAST_BYTES
    has_begun = NVCOMP in (begun or "")
    if not (enough or has_begun):
        return False
    sizes = [(layout.file_nbytes, layout.chunk_nbytes) for layout in large]
    with contextlib.ExitStack() as stack:
        client = None if threads else current_client(stack)
        if client is not None:
            # Each worker compresses with its own threads, or on its own GPU.
            each: dict[str, int] = client.nthreads()
            if not has_begun and max(each.values(), default=_MANY_THREADS) >= _MANY_THREADS:
                return False
            answers: dict[str, Any] = client.run(_can_compress, sizes)
            return bool(answers) and all(answers.values())
    pays = (threads or default_threads) < _MANY_THREADS
    return (pays or has_begun) and _can_compress(sizes)


def _can_compress(sizes: list[tuple[int, int]]) -> bool:
    """Whether this process has a GPU with room for files of these sizes."""
    try:
        gpu_encoder_version()
        return all(fits(*size) for size in set(sizes))
    except MissingPackageError:
        return False
