import pytest

from scgpu_tasks import codeversion as module
from scgpu_tasks.codeversion import code_version


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
    code_version.cache_clear()
    yield root
    code_version.cache_clear()


def version(stage):
    code_version.cache_clear()
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
