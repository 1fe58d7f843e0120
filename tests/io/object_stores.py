"""Convert from and to real servers on this machine: plain http, and S3 as moto speaks it.

    pip install 'moto[server]' s3fs aiohttp
    python -m tests.io.object_stores

No part of the test suite: these packages are needed for nothing else.
"""

from __future__ import annotations

import functools
import http.server
import logging
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import s3fs
import zarr
from moto.server import ThreadedMotoServer

from scgpu_tasks.errors import ScgpuError
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr
from scgpu_tasks.io.source import fsspec_store

from .adatas import assert_same
from .test_convert_round_trip import atlas, read, write

SPEC = ConvertSpec(chunk_bytes=16 * 1024, shard_bytes=128 * 1024)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing of it."""

    def log_message(self, *args: Any) -> None:
        """Leave out the line for each request."""


def make_sources(folder: Path) -> dict[str, ad.AnnData]:
    """One AnnData in every form that can lie behind a URL."""
    made = {}
    for name, form, choice in (
        ("a.h5ad", "h5ad", 1),
        ("two.zarr", "zarr v2", 1),
        ("three.zarr", "zarr v3", 0),
    ):
        write(atlas(), folder / name, form, choice)
        if form != "h5ad":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                zarr.consolidate_metadata(str(folder / name))
        made[name] = read(folder / name)
    return made


def over_http(folder: Path, expected: dict[str, ad.AnnData]) -> None:
    """Convert from a plain web server, and refuse what is not there."""
    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    for name in ("two.zarr", "three.zarr"):
        target = folder / f"http-{name}"
        convert_zarr(f"{base}/{name}", target, spec=SPEC)
        assert_same(expected[name], read(target))
        print(f"http, {name}: the same")
    try:
        convert_zarr(f"{base}/none.zarr", folder / "none-out.zarr")
    except ScgpuError as error:
        print(f"http, nothing there: {type(error).__name__}: {error}")
    server.shutdown()


def over_s3(folder: Path, expected: dict[str, ad.AnnData]) -> None:
    """Convert from S3, to S3, and from S3 to S3; refuse what exists, and replace it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    fs = s3fs.S3FileSystem()
    fs.mkdir("atlases")
    for name in expected:
        fs.put(str(folder / name), f"atlases/{name}", recursive=(folder / name).is_dir())
        target = folder / f"s3-{name.replace('.h5ad', '.zarr')}"
        convert_zarr(f"s3://atlases/{name}", target, spec=SPEC)
        assert_same(expected[name], read(target))
        print(f"s3, {name}: the same")
    for source in (folder / "a.h5ad", "s3://atlases/three.zarr"):
        url = "s3://atlases/out.zarr"
        result = convert_zarr(source, url, spec=SPEC, overwrite=True, staging=folder / "stage")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ad.read_zarr(zarr.open_group(fsspec_store(url, read_only=True), mode="r"))
        assert_same(expected[Path(source).name], found)
        assert list((folder / "stage").iterdir()) == []
        print(f"{source} to {url}: the same, {result.shards} shards")
    try:
        convert_zarr(folder / "a.h5ad", url, spec=SPEC, staging=folder / "stage")
    except ScgpuError as error:
        print(f"s3, again: {type(error).__name__}: {error}")
    for source in ("s3://atlases/none.zarr", "s3://nowhere/none.h5ad"):
        try:
            convert_zarr(source, folder / "none-out.zarr")
        except ScgpuError as error:
            print(f"s3, nothing there: {type(error).__name__}: {error}")
    server.stop()


def main() -> None:
    """Run all, and say what was seen."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = make_sources(folder)
        over_http(folder, expected)
        over_s3(folder, expected)


if __name__ == "__main__":
    main()
