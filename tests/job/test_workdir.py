import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from scgpu_tasks.errors import OutputError
from scgpu_tasks.job.workdir import (
    MANIFEST,
    WorkDir,
    require_writable,
    stage_key,
)


def publish(work, key="k1", text="numbers", summary=None, *, replace=False):
    with work.draft("qc") as draft:
        (draft.path / "a.txt").write_text(text)
        (draft.path / "sub").mkdir()
        (draft.path / "sub" / "b.txt").write_text("more")
        do = draft.replace if replace else draft.publish
        return do(key, inputs={"store": "s"}, summary=summary or {"n": 1})


@pytest.fixture
def work(tmp_path):
    return WorkDir(tmp_path / "work")


def test_a_published_folder_is_found_with_its_summary(work):
    done = publish(work)
    found = work.find("qc", "k1")
    assert found == done
    assert found.summary == {"n": 1}
    assert (found.path / "sub" / "b.txt").read_text() == "more"
    assert work.find("qc", "k2") is None
    assert work.find("pca", "k1") is None


def damage_truncate(folder):
    (folder / "a.txt").write_text("number")


def damage_flip(folder):
    (folder / "a.txt").write_text("Numbers")


def damage_delete(folder):
    (folder / "sub" / "b.txt").unlink()


def damage_manifest_gone(folder):
    (folder / MANIFEST).unlink()


def damage_manifest_cut(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])


def damage_summary_edited(folder):
    body = json.loads((folder / MANIFEST).read_text())
    body["summary"]["n"] = 2
    (folder / MANIFEST).write_text(json.dumps(body))


def damage_manifest_not_a_mapping(folder):
    (folder / MANIFEST).write_text("[1]")


def damage_file_in_its_place(folder):
    shutil.rmtree(folder)
    folder.write_text("not a folder")


DAMAGE = [
    damage_truncate,
    damage_flip,
    damage_delete,
    damage_manifest_gone,
    damage_manifest_cut,
    damage_summary_edited,
    damage_manifest_not_a_mapping,
    damage_file_in_its_place,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_folder_is_not_handed_out_and_can_be_published_again(work, damage):
    damage(publish(work).path)
    assert work.find("qc", "k1") is None
    publish(work)
    assert (work.find("qc", "k1").path / "a.txt").read_text() == "numbers"
    assert [path.name for path in (work.root / "qc").iterdir()] == ["k1"]


def test_a_folder_renamed_to_another_key_is_not_handed_out(work):
    publish(work).path.rename(work.root / "qc" / "k2")
    assert work.find("qc", "k2") is None


def test_a_draft_that_fails_leaves_nothing(work):
    def write_half():
        with work.draft("qc") as draft:
            (draft.path / "a.txt").write_text("half")
            msg = "half way"
            raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="half"):
        write_half()
    assert list((work.root / "qc").iterdir()) == []


def test_the_first_of_two_writers_stays_and_both_get_an_intact_folder(work):
    first = publish(work, text="same", summary={"n": 1})
    second = publish(work, text="same", summary={"n": 2})
    assert second.summary == first.summary == {"n": 1}
    assert [p.name for p in (work.root / "qc").iterdir()] == ["k1"]


def test_many_writers_of_one_key_at_once_all_get_an_intact_folder(work):
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda i: publish(work, replace=i % 3 == 0), range(40)))
    assert all(folder.summary == {"n": 1} for folder in done)
    assert work.find("qc", "k1") is not None
    assert [p.name for p in (work.root / "qc").iterdir()] == ["k1"]


def test_a_refresh_replaces_an_intact_folder(work):
    publish(work, text="old")
    publish(work, text="new", replace=True)
    assert (work.find("qc", "k1").path / "a.txt").read_text() == "new"


def test_clean_removes_the_draft_of_a_killed_process_and_keeps_that_of_a_live_one(work):
    script = textwrap.dedent(f"""
        import os, signal
        from scgpu_tasks.job.workdir import WorkDir
        with WorkDir({str(work.root)!r}).draft("qc") as draft:
            (draft.path / "half.bin").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    killed = subprocess.Popen([sys.executable, "-c", script])
    # Nobody has asked how it ended: it is still in the table of processes, as a zombie.
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    (left,) = (work.root / "qc").iterdir()
    with work.draft("qc") as mine:
        assert work.clean() == [left]
        assert mine.path.is_dir()
        assert not left.exists()
    assert killed.wait() == -signal.SIGKILL


def test_a_draft_whose_process_id_was_given_to_another_process_is_removed(work):
    with work.draft("qc") as draft:
        machine, pid, started, token = draft.path.name.split("-")[1:]
        reused = draft.path.with_name(f".draft-{machine}-{pid}-{int(started) - 9999}-{token}")
        reused.mkdir()
        assert work.clean() == [reused]


def test_a_draft_of_another_machine_is_removed_only_when_old(work):
    other = work.root / "qc" / ".draft-feedbeef0000-1-1-00"
    other.mkdir(parents=True)
    (other / "part").write_text("x")
    assert work.clean() == []
    old = time.time() - 3 * 24 * 3600
    os.utime(other / "part", (old, old))
    os.utime(other, (old, old))
    assert work.clean() == [other]


def test_an_unwritable_folder_is_refused_naming_folder_and_option(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match=r"file/runs .*--out"):
        require_writable(tmp_path / "file" / "runs", option="out")


def test_a_key_changes_with_everything_that_determines_the_output():
    base = {"fingerprint": "f", "digests": ["a", "b"], "code": "c", "device": "cpu"}
    key = stage_key("qc", **base)
    assert key == stage_key("qc", **base)
    others = [
        stage_key("pca", **base),
        stage_key("qc", **{**base, "fingerprint": "g"}),
        stage_key("qc", **{**base, "digests": ["b", "a"]}),
        stage_key("qc", **{**base, "code": "d"}),
        stage_key("qc", **{**base, "device": "gpu"}),
    ]
    assert len({key, *others}) == 6
