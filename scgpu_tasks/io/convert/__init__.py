"""Any AnnData in, a store out that a GPU reads fast: streamed, verified, resumable."""

from scgpu_tasks.io.convert.audit import is_untouched, verify_store
from scgpu_tasks.io.convert.convert import ConvertResult, convert_zarr, is_current
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.convert.progress import Progress
from scgpu_tasks.io.manifest import manifest_path, read_manifest

__all__ = [
    "ConvertResult",
    "ConvertSpec",
    "Progress",
    "convert_zarr",
    "is_current",
    "is_untouched",
    "manifest_path",
    "read_manifest",
    "verify_store",
]
