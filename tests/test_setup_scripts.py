"""The scripts behind ``make demo`` and ``make test``: finding a Python, making .venv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Python for real, but environments are an empty folder with this script, and pip and uv only
# note what they were asked to install; uv works where the variable UV says so.
PYTHON = f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv $3" >>"$LOG" ;;
"-m pip") shift 2; [ "$1" = --version ] || echo "pip $*" >>"$LOG" ;;
"-m uv") [ "$UV" ] || exit 1; shift 3; echo "uv $*" >>"$LOG" ;;
*) exec "{sys.executable}" "$@" ;;
esac
"""


def find_python(path: list[Path], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.pathsep.join(map(str, path)), "HOME": "/nonexistent", **environment}
    command = [shutil.which("sh") or "/bin/sh", str(ROOT / ".ci" / "python")]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Folder for PATH with what the scripts call and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "cat", "dirname", "mkdir", "cp", "rm", "cmp", "env"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def old_python(folder: Path, name: str) -> None:
    executable(folder / name, "#!/bin/sh\nexit 1\n")


def test_an_old_default_is_passed_over_for_a_newer_one(tools: Path, tmp_path: Path) -> None:
    old_python(tools, "python3")
    old_python(tools, "python3.12")
    new = executable(tools / "python3.13", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    found = find_python([tools])
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)
    assert new.exists()


@pytest.mark.parametrize("where", [".pyenv/versions/3.12.9", "elsewhere/versions/3.13.1"])
def test_pythons_of_pyenv_are_found_without_being_on_the_path(
    tools: Path, tmp_path: Path, where: str
) -> None:
    old_python(tools, "python3")
    executable(
        tmp_path / where / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    )
    root = {} if where.startswith(".") else {"PYENV_ROOT": str(tmp_path / "elsewhere")}
    found = find_python([tools], HOME=str(tmp_path), **root)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_without_a_new_enough_python_the_message_says_what_to_install(tools: Path) -> None:
    old_python(tools, "python3")
    found = find_python([tools])
    assert found.returncode == 1
    assert "No Python 3.12 or newer" in found.stderr
    assert "make demo PYTHON=" in found.stderr
    assert found.stdout == ""


def test_a_python_that_was_named_is_taken_or_refused_never_replaced(tools: Path) -> None:
    executable(tools / "python3.12", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    old_python(tools, "mine")
    refused = find_python([tools], PYTHON=str(tools / "mine"))
    assert refused.returncode == 1
    assert "mine is not a Python 3.12" in refused.stderr
    taken = find_python([tools], PYTHON=sys.executable)
    assert (taken.returncode, taken.stdout.strip()) == (0, sys.executable)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "check out"
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def make_venv(checkout: Path, *arguments: str, uv: str = "") -> list[str]:
    """Run .ci/venv; what it did, one line each, but for the installation of uv itself."""
    log = checkout.parent / "log"
    log.write_text("")
    python = executable(checkout.parent / "python3.12", PYTHON)
    # Not the wrapper's answer to "which interpreter are you", but the wrapper itself.
    finder = executable(checkout / ".ci" / "python", f'#!/bin/sh\necho "{python}"\n')
    env = os.environ | {"LOG": str(log), "UV": uv}
    subprocess.run([checkout / ".ci" / "venv", *arguments], check=True, env=env)
    assert finder.exists()
    did = log.read_text().splitlines()
    installed = any("--editable" in line for line in did)
    assert ("pip install --quiet uv" in did) == installed
    return [line for line in did if line != "pip install --quiet uv"]


def test_the_environment_is_made_once_and_installed_once(checkout: Path) -> None:
    first = make_venv(checkout)
    assert first == ["venv .venv", "pip install --quiet --editable ."]
    assert make_venv(checkout) == []


def test_uv_installs_where_it_can_and_pip_is_not_asked(checkout: Path) -> None:
    how = "uv install --quiet --python .venv/bin/python --compile-bytecode"
    assert make_venv(checkout, "test", uv="works") == [
        "venv .venv",
        f"{how} --editable .[test,docs]",
        f"{how} --no-deps celltypist==1.7.1",
    ]
    assert make_venv(checkout, "test") == []


def test_what_tests_need_is_added_to_the_environment_of_the_demo(checkout: Path) -> None:
    make_venv(checkout)
    assert make_venv(checkout, "test") == [
        "pip install --quiet --editable .[test,docs]",
        "pip install --quiet --no-deps celltypist==1.7.1",
    ]
    assert make_venv(checkout, "test") == []
    assert make_venv(checkout) == []


def test_the_environment_of_the_tests_serves_for_everything_else(checkout: Path) -> None:
    make_venv(checkout, "test")
    assert make_venv(checkout) == []
    assert make_venv(checkout, "docs") == []


def test_the_documentation_is_built_without_what_tests_need(checkout: Path) -> None:
    first = make_venv(checkout, "docs")
    assert first == ["venv .venv", "pip install --quiet --editable .[docs]"]
    assert make_venv(checkout, "docs") == []


def test_changed_requirements_are_installed_into_the_same_environment(checkout: Path) -> None:
    make_venv(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# one more\n")
    assert make_venv(checkout) == ["pip install --quiet --editable ."]


def test_a_moved_checkout_gets_a_new_environment(checkout: Path) -> None:
    make_venv(checkout)
    moved = checkout.rename(checkout.with_name("moved here"))
    assert make_venv(moved)[0] == "venv .venv"
    assert make_venv(moved) == []
