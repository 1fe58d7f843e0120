import json
import os
import time

from scgpu_tasks.job import living
from scgpu_tasks.job.owner import owner
from scgpu_tasks.job.runlog import RunLog
from scgpu_tasks.records import write_record
from scgpu_tasks.records.listing import find_records


def record_of(out, name, mark):
    """Record of a run in its QC stage, whose mark holds this name of a process."""
    log = RunLog(flow="f", run_id="", name=name, parameters={"store": "s"}, stages=("qc",))
    log.content["stages"]["qc"]["state"] = "running"
    write_record(out / name, log.content)
    (out / name / living.MARK).write_text(mark)
    return out / name


def states(out):
    return {r.folder.name: r.run["state"] for r in find_records(out)}


def ended_process():
    machine, _, started = owner().split("-")
    return f"{machine}-{2**22 + 1}-{started}"


def test_only_runs_whose_process_is_gone_are_marked(tmp_path):
    record_of(tmp_path, "killed", ended_process())
    record_of(tmp_path, "alive", owner())
    # The number of a process comes again; its start tells the two apart.
    machine, pid, started = owner().split("-")
    record_of(tmp_path, "other", f"{machine}-{pid}-{int(started) - 1000}")
    assert {run["name"] for run in living.sweep(tmp_path)} == {"killed", "other"}
    assert states(tmp_path) == {"killed": "killed", "other": "killed", "alive": "running"}
    assert living.sweep(tmp_path) == []
    run = json.loads((tmp_path / "killed" / "run.json").read_text())
    assert run["error"]["stage"] == "qc"
    assert run["stages"]["qc"]["state"] == "failed"
    assert "This run was killed" in (tmp_path / "killed" / "report.html").read_text()


def test_a_run_of_another_machine_counts_as_killed_once_it_is_silent(tmp_path):
    folder = record_of(tmp_path, "far", "0123456789ab-12-345")
    assert living.sweep(tmp_path) == []
    long_ago = time.time() - living.SILENT_FOR_S - 1
    os.utime(folder / living.MARK, (long_ago, long_ago))
    assert [run["name"] for run in living.sweep(tmp_path)] == ["far"]


def test_a_list_shows_a_killed_run_as_such_and_leaves_it_alone(tmp_path):
    folder = record_of(tmp_path, "killed", ended_process())
    before = (folder / "run.json").read_bytes()
    (record,) = find_records(tmp_path)
    assert living.as_it_is(record).run["state"] == "killed"
    assert (folder / "run.json").read_bytes() == before


def test_the_mark_lasts_as_long_as_the_run_and_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(living, "SECONDS_BETWEEN_TOUCHES", 0.02)
    with living.marked(tmp_path):
        mark = tmp_path / living.MARK
        assert mark.read_text() == owner()
        os.utime(mark, (0, 0))
        deadline = time.monotonic() + 10
        while mark.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not mark.exists()
