import subprocess
import sys

from scgpu_tasks.io import memory


def test_the_memory_limit_is_that_of_dask():
    from distributed.system import MEMORY_LIMIT

    assert memory.memory_limit() == MEMORY_LIMIT


def test_the_limit_of_a_control_group_is_kept(tmp_path, monkeypatch):
    group = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUPS", (group,))
    ask = memory.memory_limit.__wrapped__
    group.write_text("max\n")
    whole = ask()
    group.write_text("1000000\n")
    assert ask() == 1_000_000 < whole


def test_opening_a_store_imports_no_scheduler(small_store):
    script = (
        "import sys; from scgpu_tasks.io.rows import open_rows; open_rows(sys.argv[1]);"
        "print('distributed' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, small_store], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
