"""Which Dask client the engine uses."""

from __future__ import annotations

import dask.array as da
import numpy as np
from distributed import Client

from scgpu_tasks.stages import parcels
from scgpu_tasks.stages.engine import Engine
from scgpu_tasks.stages.sources import as_source

from .test_engine import Totals


def matrix():
    return np.random.default_rng(0).integers(0, 9, (900, 40)).astype(np.float32)


def threads_client():
    return Client(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0"
    )


def total_and_places(x):
    """Total over a Dask array, and whether workers of a client found it."""
    source, places = as_source(da.from_array(x, chunks=(300, -1))), []
    total = 0.0

    def merge(_, part, where):
        nonlocal total
        total += part
        places.append(where is not None)

    with Engine(source) as engine:
        engine.fold(lambda _: Totals(), merge)
    return total, set(places)


def test_a_client_that_was_closed_is_not_asked():
    x = matrix()
    with threads_client() as client:
        assert total_and_places(x) == (x.sum(), {True})
        client.close()
        # Still the current one of this block.
        assert Client.current() is client
        assert total_and_places(x) == (x.sum(), {False})


def test_the_next_client_is_found_after_one_was_closed_in_its_block():
    x = matrix()
    with threads_client() as first:
        first.close()
        second = threads_client()
        try:
            assert total_and_places(x) == (x.sum(), {True})
        finally:
            second.close()
    assert total_and_places(x) == (x.sum(), {False})


class Weighty(Totals):
    """With data enough to travel through shared memory."""

    def __init__(self):
        super().__init__()
        self.weights = np.arange(1 << 18, dtype=np.float64)

    def result(self):
        return self.total + self.weights[-1]


def weighty_total(x):
    found = []
    with Engine(as_source(da.from_array(x, chunks=(300, -1)))) as engine:
        engine.fold(lambda _: Weighty(), lambda _, part, __: found.append(part))
        assert engine.once(np.sum, np.ones(1 << 18)) == 1 << 18
    return sum(found)


def test_workers_that_do_not_see_the_shared_memory_get_tasks_by_the_network(monkeypatch):
    x = matrix()
    want = x.sum() + 3 * ((1 << 18) - 1)
    with threads_client():
        assert weighty_total(x) == want
        unpacked = []

        def elsewhere(value):
            unpacked.append(type(value).__name__)
            if isinstance(value, parcels.Parcel):
                raise FileNotFoundError
            return value

        monkeypatch.setattr(parcels, "unpack_sent", elsewhere)
        assert weighty_total(x) == want
        assert "Parcel" in unpacked
