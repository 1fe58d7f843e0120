"""Which command lines are completed, and to what."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scgpu_tasks.job.server import prefect_api
from scgpu_tasks.operate.bare_names import bare_name, choose

ROOT = Path(__file__).parents[2]
SERVER = "http://127.0.0.1:4200/api/"


@pytest.mark.parametrize(
    "line",
    [
        "prefect deployment run FLOW",
        "prefect deployments run FLOW --watch",
        "prefect deployment run --watch FLOW",
        "prefect deployment run -p store=a.zarr -p n_comps=30 FLOW",
        "prefect deployment run --param=store=a.zarr --tag nightly FLOW --start-in '1 hour'",
        "prefect -p staging --no-prompt deployment run FLOW -p n_comps=30",
        "prefect --profile staging deployment run --no-watch FLOW",
    ],
)
def test_a_bare_name_is_found(line: str) -> None:
    arguments = shlex.split(line)
    assert bare_name(arguments) == arguments.index("FLOW")


@pytest.mark.parametrize(
    "line",
    [
        "prefect",
        "prefect deployment",
        "prefect deployment run",
        "prefect deployment run FLOW/DEPLOYMENT",
        "prefect deployment run --id 1234",
        "prefect deployment run --help",
        "prefect deployment run FLOW --help",
        "prefect deployment inspect FLOW",
        "prefect deployment pause FLOW",
        "prefect flow-run run FLOW",
        "prefect worker start --pool deployment --name run",
        "prefect deploy --name deployment",
        "prefect -p deployment run FLOW",
    ],
)
def test_other_commands_are_left_alone(line: str) -> None:
    assert bare_name(shlex.split(line)) is None


def test_the_only_deployment_of_a_flow_is_chosen() -> None:
    assert choose("f", ["f/nightly"], [], SERVER) == "f/nightly"


def test_several_deployments_are_named_with_their_commands() -> None:
    with pytest.raises(LookupError) as caught:
        choose("f", ["f/b", "f/a"], [], SERVER)
    assert str(caught.value.args[0]).splitlines()[1:] == [
        "  prefect deployment run f/a",
        "  prefect deployment run f/b",
    ]


def test_an_unknown_flow_is_answered_with_those_that_are_there() -> None:
    with pytest.raises(LookupError, match=r"No deployment of a flow 'g'(.|\n)*  f/nightly"):
        choose("g", [], ["f/nightly"], SERVER)
    with pytest.raises(LookupError, match="make deploy"):
        choose("g", [], [], SERVER)


def run(command: list[str], folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run in a folder, where no server answers."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_CLIENT_MAX_RETRIES": "0",
        "DO_NOT_TRACK": "1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_server_that_does_not_answer_is_named_instead_of_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefect", "deployment", "run", "atlas-qc"]
    answer = run(command, ROOT, tmp_path)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr + answer.stdout
    assert "Cannot look up the deployment of flow 'atlas-qc'" in answer.stderr


def test_a_run_in_the_folder_of_the_repository_leaves_the_plugin_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_PLUGINS_ENABLED", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")

    def switch(folder: Path) -> str | None:
        monkeypatch.chdir(folder)
        with prefect_api():
            return os.environ.get("PREFECT_PLUGINS_ENABLED")

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "prefect.toml").write_text("[plugins]\nenabled = true\n")
    folders = (ROOT, tmp_path, tmp_path / "other")
    assert [switch(folder) for folder in folders] == ["false", None, None]


def test_the_plugin_touches_no_other_program_and_loads_in_no_other_folder(
    tmp_path: Path,
) -> None:
    code = "import sys, prefect; print('scgpu_tasks.operate' in sys.modules, sys.argv[1:])"
    words = ["deployment", "run", "atlas-qc"]
    here, there = (
        run([sys.executable, "-c", code, *words], folder, tmp_path)
        for folder in (ROOT, tmp_path)
    )
    assert here.stdout.strip() == f"True {words}"
    assert there.stdout.strip() == f"False {words}"
    assert here.stderr == there.stderr == ""
