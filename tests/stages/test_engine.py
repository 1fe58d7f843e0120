"""The engine: order, memory, progress, errors, threads and Dask clients."""

from __future__ import annotations

import pickle
import threading

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import Client, LocalCluster

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.stages.engine import Engine, spans_of
from scgpu_tasks.stages.sources import as_source, block_rows

from .atlases import Cut, atlas


class Totals:
    """Sum of the values of a span; fails at a row if told to."""

    prefer = None
    running = 0
    most = 0
    lock = threading.Lock()

    def __init__(self, fail_at=None):
        self.fail_at = fail_at
        self.total = 0.0

    def recall(self):
        return False

    def visit(self, rows, start):
        if self.fail_at is not None and start <= self.fail_at < start + rows.n_rows:
            msg = "broken"
            raise ValueError(msg)
        self.total += float(rows.data.sum())

    def result(self):
        return self.total


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_spans_hold_every_block_once_and_stay_few():
    source = Cut(np.zeros((1000, 2)), range(1001))
    spans = spans_of(source)
    assert [b for span in spans for b in span.bounds[:-1]] == list(range(1000))
    assert len(spans) < 128
    assert spans[-1].stop == 1000


@pytest.mark.parametrize("n_blocks", [1, 15, 16, 17, 55, 110])
def test_spans_on_gpus_are_few_and_about_equally_long(n_blocks):
    source = Cut(np.zeros((n_blocks, 2)), range(n_blocks + 1))
    source.device = "gpu"
    spans = spans_of(source)
    assert len(spans) == min(n_blocks, 16)
    assert [b for span in spans for b in span.bounds[:-1]] == list(range(n_blocks))
    lengths = [span.n_blocks for span in spans]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_results_are_merged_in_order_for_any_number_of_threads(workers):
    order = []
    with Engine(Cut(np.ones((50, 3)), range(51)), workers=workers) as engine:
        engine.fold(
            lambda _: Totals(), lambda span, value, _: order.append((span.start, value))
        )
    assert order == [(i, 3.0) for i in range(50)]


def test_only_a_few_spans_wait_to_be_merged():
    source = Cut(np.ones((60, 3)), range(61))
    made, merged = [], []
    with Engine(source, workers=2) as engine:

        def make(span):
            made.append(span.number)
            assert len(made) - len(merged) <= 2 + 1 + 1
            return Totals()

        engine.fold(make, lambda span, *_: merged.append(span.number))
    assert len(merged) == 60


def test_progress_rises_to_the_total():
    seen = []
    source = Cut(np.ones((10, 3)), range(11))
    with Engine(source, progress=lambda done, total: seen.append((done, total)), passes=2) as e:
        for _ in range(2):
            e.fold(lambda _: Totals(), lambda *_: None)
    assert seen == [(i, 20) for i in range(1, 21)]


def test_an_error_names_the_rows_and_stops_the_run():
    source = Cut(np.ones((100, 3)), range(0, 101, 10))
    with (
        pytest.raises(ValueError, match="broken") as caught,
        Engine(source, workers=2) as engine,
    ):
        engine.fold(lambda _: Totals(fail_at=35), lambda *_: None)
    assert any("rows 30:40" in note for note in caught.value.__notes__)
    assert len(source.reads) < 10


def test_workers_of_a_dask_client_read_a_store(client, small_store):
    source = open_rows(small_store, chunks=200)
    total, where = [], set()
    with Engine(source) as engine:

        def merge(span, value, worker):
            total.append(value)
            where.add(worker)

        engine.fold(lambda _: Totals(), merge)
    assert engine.stored_bytes >= source.stored_bytes * 0.5
    assert None not in where
    expected = [float(source.read_block(i).data.sum()) for i in range(source.n_blocks)]
    assert total == expected


def test_a_dask_array_is_visited_block_by_block(client):
    matrix, *_ = atlas()
    array = da.from_array(matrix.toarray(), chunks=(150, -1)).map_blocks(sp.csr_matrix)
    total = []
    with Engine(as_source(array)) as engine:
        engine.fold(lambda _: Totals(), lambda _, value, __: total.append(value))
    assert sum(total) == matrix.sum()
    assert len(total) == 4


def test_a_worker_error_names_the_rows(client, small_store):
    source = open_rows(small_store, chunks=200)
    with pytest.raises(ValueError, match="broken") as caught, Engine(source) as engine:
        engine.fold(lambda _: Totals(fail_at=450), lambda *_: None)
    assert any("rows 400:600" in note for note in caught.value.__notes__)


def fold_inside_a_task(store):
    total = []
    with Engine(open_rows(store, chunks=300)) as engine:
        engine.fold(lambda _: Totals(), lambda _, value, worker: total.append((value, worker)))
    return sum(value for value, _ in total), {worker for _, worker in total}


def test_a_task_on_the_only_thread_of_the_only_worker_does_not_wait_for_itself(small_store):
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as alone,
    ):
        total, where = alone.submit(fold_inside_a_task, str(small_store)).result(timeout=60)
    source = open_rows(small_store)
    assert total == source.read(0, source.shape[0]).data.sum()
    assert None not in where


def test_sources_and_tasks_are_small_when_pickled(small_store):
    assert len(pickle.dumps(open_rows(small_store))) < 5_000


def test_a_matrix_in_memory_stays_in_this_process(client):
    matrix, *_ = atlas()
    where = set()
    with Engine(as_source(matrix)) as engine:
        engine.fold(lambda _: Totals(), lambda _, __, worker: where.add(worker))
    assert where == {None}


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ("text", "must be a Dask array"),
        (da.zeros((10, 10), chunks=(5, 5)), r"rechunk\(\(20_000, -1\)\)"),
        (np.zeros(3), "must be a Dask array"),
    ],
)
def test_what_has_no_rows_is_refused(matrix, words):
    with pytest.raises(FormatError, match=words):
        as_source(matrix)


def test_csc_in_memory_is_taken():
    matrix, *_ = atlas()
    source = as_source(matrix.tocsc())
    assert source.read(0, 10).data.sum() == matrix[:10].sum()


def test_a_block_of_the_wrong_width_is_refused():
    with pytest.raises(FormatError, match="4 columns in a matrix of 5"):
        block_rows(np.zeros((2, 4)), 5)


def test_columns_out_of_range_are_refused():
    matrix = sp.csr_matrix(np.eye(3))
    matrix.indices = np.array([0, 1, 9], np.int32)
    with pytest.raises(FormatError, match=r"outside 0\.\.2"):
        block_rows(matrix, 3)
