"""One thread serves all clean-ups of received streams, and what is free goes back to the system."""

import inspect
import platform
import threading

import psutil
import pytest
from nvflare.fuel.f3.streaming.byte_receiver import RxTask

from medflare.flare.exchange.upkeep import DelayedCalls, give_back_memory, share_cleanup_thread
from waiting import eventually


def waited_for(condition: threading.Event) -> bool:
    return condition.wait(60)


def test_calls_come_in_the_order_of_their_time() -> None:
    calls, order, done = DelayedCalls(), list[str](), threading.Event()
    calls.after(0.2, done.set)
    calls.after(0.15, lambda: order.append("late"))
    calls.after(0.05, lambda: order.append("early"))
    assert waited_for(done)
    assert order == ["early", "late"]


def test_a_cancelled_call_does_not_come() -> None:
    calls, order, done = DelayedCalls(), list[str](), threading.Event()
    calls.after(0.05, lambda: order.append("cancelled")).cancel()
    calls.after(0.1, done.set)
    assert waited_for(done)
    assert order == []


def test_a_failing_call_does_not_stop_the_others() -> None:
    def divide_by_zero() -> None:
        1 / 0  # noqa: B018

    calls, done = DelayedCalls(), threading.Event()
    calls.after(0.0, divide_by_zero)
    calls.after(0.05, done.set)
    assert waited_for(done)


def test_hundreds_of_streams_share_one_thread_that_ends_with_them() -> None:
    before = threading.active_count()
    calls, done = DelayedCalls(), threading.Event()
    for number in range(300):
        calls.after(0.2 + number * 1e-4, lambda: None)
    calls.after(0.3, done.set)
    assert threading.active_count() <= before + 1, "those of other tests may end meanwhile"
    assert waited_for(done)
    assert eventually(lambda: threading.active_count() <= before)
    again = threading.Event()
    calls.after(0.01, again.set)
    assert waited_for(again)


def test_flare_still_has_what_is_replaced() -> None:
    """Fails when a new FLARE forgets its streams in another way: then `streams` has to follow, or can go."""
    source = inspect.getsource(inspect.getmodule(RxTask))  # type: ignore[arg-type]
    assert "threading.Timer" in source
    assert "self.cleanup_timer.cancel()" in source
    share_cleanup_thread()
    task = RxTask(1, "somebody", cell=None)
    before = threading.active_count()
    tasks = [task, *(RxTask(number, "somebody", cell=None) for number in range(2, 50))]
    for one in tasks:
        RxTask.rx_task_map[(one.origin, one.sid)] = one
        one._schedule_remove_task(0.2)
    assert threading.active_count() <= before + 1
    assert eventually(lambda: not any(key[0] == "somebody" for key in RxTask.rx_task_map))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides by itself")
def test_memory_goes_back_although_something_lies_behind_it() -> None:
    process, freed = psutil.Process(), [bytes(100_000) for _ in range(1000)]
    behind = bytes(100_000)
    freed.clear()
    before = process.memory_info().rss
    give_back_memory()
    assert before - process.memory_info().rss > 50_000_000, "of 100 MB"
    assert len(behind) == 100_000
