import os
import subprocess
import sys

import pytest

from scgpu_tasks.job import codeversion as module
from scgpu_tasks.job.codeversion import code_version


def clear():
    code_version.cache_clear()
    module._read_module.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package that stands in for this one, whose files a test may edit."""
    root = tmp_path / "scgpu_tasks"
    for name, text in {
        "__init__.py": "",
        "stages/__init__.py": "",
        "stages/qc.py": "from scgpu_tasks.kernels import sums\ndef f():\n    sums.f()\n",
        "stages/pca.py": "def run():\n    import scgpu_tasks.kernels.gram\n",
        "kernels/__init__.py": "",
        "kernels/sums.py": '"""Sums."""\nfrom .base import one\n\ndef f():\n    return one\n',
        "kernels/base.py": "one = 1\n",
        "kernels/gram.py": "NAME = 'scgpu_tasks.kernels.lazy'\n",
        "kernels/lazy.py": "two = 2\n",
        "errors.py": "class E(Exception): ...\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(module, "_PACKAGE_DIR", root)
    clear()
    yield root
    clear()


def version(stage):
    clear()
    return code_version(f"scgpu_tasks.stages.{stage}")


def test_code_version_ignores_comments_docstrings_and_layout(package):
    before = version("qc")
    (package / "kernels" / "sums.py").write_text(
        '"""Other words."""\nfrom .base import one  # why\n\n\n'
        'def f():\n    """More."""\n    return (one)\n'
    )
    assert version("qc") == before


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("stages/qc.py", "def run():\n    return 0\n", {"qc"}),
        ("kernels/base.py", "one = 1.5\n", {"qc"}),
        ("kernels/gram.py", "NAME = ''\n", {"pca"}),
        ("kernels/lazy.py", "two = 3\n", {"pca"}),
        ("kernels/unused.py", "three = 3\n", set()),
        ("errors.py", "class F(Exception): ...\n", set()),
        ("kernels/fast.cu", "__global__ void f();\n", {"qc", "pca"}),
    ],
)
def test_code_version_follows_the_imports_of_a_stage(package, file, text, changed):
    before = {stage: version(stage) for stage in ("qc", "pca")}
    (package / file).write_text(text)
    assert {stage for stage in before if version(stage) != before[stage]} == changed


def test_code_version_is_the_same_in_every_process():
    script = (
        "from scgpu_tasks.job.codeversion import code_version;"
        "print(code_version('scgpu_tasks.datasets', 'scgpu_tasks.stages.qc'))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_code_version_sees_a_changed_set_default_and_nested_function(package):
    file = package / "kernels" / "base.py"
    texts = [
        "def f(x=1):\n    return x in {'a', 'b'}\n",
        "def f(x=2):\n    return x in {'a', 'b'}\n",
        "def f(x=1):\n    return x in {'a', 'c'}\n",
        "def f(x=1):\n    g = lambda: 1.0\n    return g\n",
        "def f(x=1):\n    g = lambda: 1\n    return g\n",
    ]
    versions = []
    for text in texts:
        file.write_text(text)
        versions.append(version("qc"))
    assert len(set(versions)) == len(texts)
