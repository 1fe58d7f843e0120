"""What runs on pull requests and before commits is what .ci/run runs."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CI_RUN = (ROOT / ".ci" / "run").read_text("utf-8")


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = read(".github/workflows/ci.yml")["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_a_pull_request_runs_what_ci_runs_and_nothing_else(jobs: dict[str, Any]) -> None:
    assert commands(jobs["ci"]) == [".ci/run"]
    assert "if" not in jobs["ci"]


def test_only_a_label_starts_the_gpu_tests(jobs: dict[str, Any]) -> None:
    gpu = jobs["gpu"]
    assert "labels" in gpu["if"]
    assert "gpu" in gpu["runs-on"]
    assert any(command.endswith("pytest -m gpu") for command in commands(gpu))


def test_the_pythons_of_the_workflow_are_supported(jobs: dict[str, Any]) -> None:
    lowest = PROJECT["requires-python"].removeprefix(">=")
    versions = jobs["ci"]["strategy"]["matrix"]["python"]
    assert versions[0] == lowest
    assert min(versions, key=lambda v: int(v.split(".")[1])) == lowest


def test_scripts_and_extras_that_the_workflow_names_are_there(jobs: dict[str, Any]) -> None:
    text = " ".join(command for job in jobs.values() for command in commands(job))
    for script in re.findall(r"\.ci/\w+", text):
        assert os.access(ROOT / script, os.X_OK), script
    for target in re.findall(r"make (\w+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for extras in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_every_path_among_the_gpu_lines_of_the_coverage_report_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (paths,) = re.findall(r"^GPU = (.+)$", makefile, re.MULTILINE)
    assert [path for path in paths.split(",") if not any(ROOT.glob(path))] == []


def test_hooks_run_the_checks_of_ci_with_its_tools() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    hooks = {Path(hook["entry"].split()[0]).name for hook in repository["hooks"]}
    assert hooks == set(re.findall(r'"\$bin/([\w-]+)"', CI_RUN)) - {"python"}
    for hook in repository["hooks"]:
        assert hook["entry"].startswith(".venv/bin/")


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml"])
def test_a_form_for_issues_has_questions_of_kinds_that_github_knows(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}")
    assert {"name", "description", "body"} <= set(form)
    for question in form["body"]:
        assert question["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        if question["type"] != "markdown":
            assert question["attributes"]["label"]


def test_recipes_name_the_lowest_python_and_files_that_are_there() -> None:
    lowest = PROJECT["requires-python"].removeprefix(">=")
    container = (ROOT / "Dockerfile").read_text("utf-8")
    assert f"FROM python:{lowest}" in container
    for sources in re.findall(r"^COPY (.+) \S+$", container, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    assert f"python={lowest}" in read("environment.yml")["dependencies"]
