import logging
import threading
import time

import pytest

from scgpu_tasks.job import monitor as monitor_module
from scgpu_tasks.job.monitor import Monitor, Steps, stage_words
from scgpu_tasks.job.progress import ProgressBars


class Page:
    """Keeps what it is shown, slowly if asked to."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.shown = []
        self.first = threading.Event()

    def progress(self, name, percent, text):
        self.first.set()
        time.sleep(self.seconds)
        self.shown.append((name, percent, text))

    def log(self, text):
        self.shown.append(("log", text))


def event(done, total, stage="qc"):
    return (0.0, {"stage": stage, "done": done, "total": total})


def test_progress_says_blocks_rate_and_time_left(monkeypatch):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: next(now))
    steps = Steps("qc", cells_per_block=1000)
    steps.take(10, 100)
    steps.take(30, 100)
    assert steps.text() == "qc: 30 of 100 blocks, 2,000 cells/s, 35 s left"
    assert steps.percent == 30


def test_shards_of_a_conversion_are_not_counted_as_cells(monkeypatch):
    now = iter([0.0, 0.0, 4.0])
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: next(now))
    steps = Steps("convert", cells_per_block=None)
    steps.take(0, 10)
    steps.take(2, 10)
    assert steps.text() == "convert: 2 of 10 shards, 0.5 shards/s, 16 s left"


def test_many_events_are_few_requests_and_none_waits_for_the_server(monkeypatch):
    monkeypatch.setattr(monitor_module, "SECONDS_BETWEEN_UPDATES", 0.0)
    page = Page(seconds=0.3)
    with Monitor(page, ProgressBars(enabled=False)) as monitor:
        monitor.begin("qc")
        began = time.monotonic()
        for done in range(1, 1001):
            monitor.on_event(event(done, 1000))
        assert time.monotonic() - began < 0.25
        monitor.end("qc", "computed", "done")
    texts = [entry for entry in page.shown if entry[0] == "qc"]
    assert len(texts) <= 3
    assert texts[-1] == ("qc", 100, "qc: 1,000 of 1,000 blocks")


def test_a_stage_that_fails_leaves_how_far_it_came():
    page = Page()
    monitor = Monitor(page, ProgressBars(enabled=False))

    def fail():
        with monitor:
            monitor.begin("pca")
            monitor.on_event(event(3, 8, stage="pca"))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert monitor.where() == "after 3 of 8 blocks"
    assert page.shown[-1][2].startswith("pca: 3 of 8 blocks")


def test_without_a_page_no_thread_is_started():
    before = threading.active_count()
    with Monitor(None, ProgressBars(enabled=False)) as monitor:
        monitor.begin("qc")
        monitor.on_event(event(1, 2))
        monitor.show("qc", lambda page: None)
        monitor.end("qc", "computed", "done")
        assert threading.active_count() == before


def test_what_cannot_be_shown_is_a_warning_and_no_failure(caplog):
    def fail(page):
        raise ConnectionError("no server")

    with (
        caplog.at_level(logging.WARNING),
        Monitor(Page(), ProgressBars(enabled=False)) as monitor,
    ):
        monitor.show("qc", fail)
    assert "qc could not be shown" in caplog.text


def test_a_stage_is_told_in_one_line():
    summary = {"findings": [{"slow": True, "what": "gzip"}, {"slow": False, "what": "small"}]}
    assert stage_words("check", summary) == "reading is slowed by gzip"
    assert stage_words("check", {"findings": []}) == "reads fast"
