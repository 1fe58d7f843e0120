from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import scgpu_tasks

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HEAVY = ("prefect", "dask", "distributed", "zarr", "anndata", "pandas", "numba", "matplotlib")
GPU = ("cupy", "cupyx", "kvikio", "rmm", "dask_cuda", "nvidia", "ucxx")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env)


def test_importing_the_package_loads_nothing_heavy_and_no_gpu_library() -> None:
    code = "import sys, json, scgpu_tasks; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code).stdout)}
    assert not loaded & {*HEAVY, *GPU, "numpy"}


def test_importing_the_package_takes_less_than_a_tenth_of_a_second() -> None:
    code = (
        "import time; start = time.process_time(); import scgpu_tasks;"
        "print(time.process_time() - start)"
    )
    assert min(float(run_python(code).stdout) for _ in range(3)) < 0.1


def test_every_public_name_loads_and_is_listed() -> None:
    for name in scgpu_tasks.__all__:
        assert getattr(scgpu_tasks, name) is not None
        assert name in dir(scgpu_tasks)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        scgpu_tasks.no_such_name  # noqa: B018


def test_using_every_public_name_loads_no_gpu_library_and_no_prefect() -> None:
    code = (
        "import sys, json, scgpu_tasks\n"
        "for name in scgpu_tasks.__all__: getattr(scgpu_tasks, name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code).stdout)}
    assert not loaded & {*GPU, "prefect", "prefect_dask", "matplotlib"}


def test_zarr_finds_the_codec_pipeline_and_its_module_is_light() -> None:
    (entry,) = metadata.entry_points(group="zarr.codec_pipeline", name="kvikio")
    assert entry.load().__name__ == "KvikioCodecPipeline"
    code = f"import sys, json, {entry.module}; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code).stdout)}
    assert not loaded & {*GPU, "prefect", "dask", "distributed", "anndata", "numba"}


def test_zarr_loads_the_codec_pipeline_in_less_than_a_tenth_of_a_second() -> None:
    # zarr loads every pipeline that is registered, on machines without a GPU as well.
    code = (
        "import time, zarr; start = time.process_time(); import scgpu_tasks.io.pipeline;"
        "print(time.process_time() - start)"
    )
    assert min(float(run_python(code).stdout) for _ in range(3)) < 0.1


def test_the_console_command_is_there_and_explains_itself() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="scgpu-tasks")
    code = f"import sys; from {entry.module} import {entry.attr} as m; sys.exit(m(['--help']))"
    shown = run_python(code).stdout
    assert "check" in shown
    assert "convert" in shown


def test_the_console_command_is_quiet_where_its_reader_has_gone(small_store: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "scgpu_tasks", "check", str(small_store), "--json"]
    with open(writer, "wb") as gone:  # noqa: PTH123
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package as its wheel installs it, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "a b"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scgpu_tasks", source / "scgpu_tasks", ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "-w", folder / "dist", source]
    subprocess.run(build, check=True)
    (wheel,) = (folder / "dist").glob("scgpu_tasks-*.whl")
    install = [*pip, "install", *offline, "--target", folder / "site", wheel]
    subprocess.run(install, check=True)
    return folder / "site"


def test_the_wheel_holds_every_file_of_the_package(installed_wheel: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {p.relative_to(root).as_posix() for p in found}

    assert files(installed_wheel / "scgpu_tasks") == files(ROOT / "scgpu_tasks")


def test_the_wheel_writes_a_report_without_the_checkout(
    installed_wheel: Path, tmp_path: Path
) -> None:
    code = """
import sys, scgpu_tasks
from scgpu_tasks.records import write_record
stages = {"qc": {"state": "failed", "seconds": 1.0}}
run = {"flow": "f", "name": "n", "state": "failed", "parameters": {}, "stages": stages}
write_record(sys.argv[1], run | {"error": {"stage": "qc", "message": "why"}})
print(scgpu_tasks.__file__)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    env = os.environ | {"PYTHONPATH": str(installed_wheel)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=env, cwd=tmp_path
    )
    assert Path(done.stdout.strip()).is_relative_to(installed_wheel)
    assert "why" in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == scgpu_tasks.__version__
    assert metadata.version("scgpu-tasks") == scgpu_tasks.__version__
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]" in changes or f"## [{scgpu_tasks.__version__}]" in changes


def test_every_dependency_has_its_reason_and_every_reason_its_dependency() -> None:
    project = PROJECT["project"]
    lines = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        lines += extra
    needed = {re.match(r"[A-Za-z0-9_.-]+", line)[0] for line in lines}
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Dependencies")[1]
    entries = re.findall(r"^- (\*\*.+?\*\*): (\S.*)$", text, re.MULTILINE)
    explained = {name for names, _ in entries for name in re.findall(r"\*\*(.+?)\*\*", names)}
    assert needed - {"scgpu-tasks"} == explained


def test_every_module_has_its_place_in_the_import_rules() -> None:
    (contract,) = [
        c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers"
    ]
    placed = {
        name.strip("( )").removeprefix("scgpu_tasks.")
        for layer in contract["layers"]
        for name in re.split(r"[|:]", layer)
    }
    package = ROOT / "scgpu_tasks"
    there = {p.stem for p in package.glob("*.py")} | {
        p.name for p in package.iterdir() if (p / "__init__.py").exists()
    }
    # Its modules lie below and above the tasks, so each has a place of its own.
    there |= {f"job.{p.stem}" for p in (package / "job").glob("*.py")}
    assert there - {"__init__", "job", "job.__init__"} - placed == set()
