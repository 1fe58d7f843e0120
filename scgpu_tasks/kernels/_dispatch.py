"""Which form of a kernel serves an array: decided by where the array lives."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from scgpu_tasks.errors import FormatError

# Package that holds each form, by the top-level package of the array's type.
FORMS: dict[str, str] = {
    "numpy": "scgpu_tasks.kernels._cpu",
    "cupy": "scgpu_tasks.kernels._gpu",
}


def form(array: Any, kernel: str) -> ModuleType:
    """Find the module with the form of `kernel` that takes `array`.

    Parameters
    ----------
    array
        An array that the kernel will be called with.
    kernel
        Name of the kernel's module, such as ``qc``.

    Raises
    ------
    FormatError
        No form of the kernel takes arrays of this type.
    """
    library = type(array).__module__.partition(".")[0]
    package = FORMS.get(library)
    if package is None:
        name = f"{type(array).__module__}.{type(array).__name__}"
        msg = f"the {kernel} kernels take arrays of {', '.join(FORMS)}, not {name}"
        raise FormatError(msg)
    return import_module(f"{package}.{kernel}")
