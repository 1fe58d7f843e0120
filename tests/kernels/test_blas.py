"""BLAS runs on one thread, whichever threads ask for it, and goes back to what it was."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from threadpoolctl import threadpool_info, threadpool_limits

from scgpu_tasks.kernels.blas import one_thread


def threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_one_thread_whichever_thread_set_a_limit_before() -> None:
    def set_limit_and_stay(ready: threading.Event, leave: threading.Event) -> None:
        with threadpool_limits(2):
            ready.set()
            leave.wait(60)

    with one_thread():
        assert set(threads()) == {1}
    before = threads()
    ready, leave = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(set_limit_and_stay, ready, leave)
        assert ready.wait(60)
        with one_thread():
            assert set(threads()) == {1}
            assert set(pool.submit(threads).result()) == {1}
        assert set(threads()) == {2}
        leave.set()
        other.result()
    with threadpool_limits(2), one_thread():
        assert set(threads()) == {1}
    assert len(threads()) == len(before)


def test_the_last_of_many_threads_takes_the_limit_back() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with one_thread():
            entered.set()
            left.wait(60)

    with threadpool_limits(2):
        thread = threading.Thread(target=first)
        thread.start()
        assert entered.wait(60)
        with one_thread():
            left.set()
            thread.join()
            # The thread that set the limit has ended.
            assert set(threads()) == {1}
        assert set(threads()) == {2}
