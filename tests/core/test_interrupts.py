"""Signals that end a process."""

import signal
import threading

import pytest

from medflare.core.interrupts import interruptible


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_process_interrupts_it_unless_it_is_ignored(stop: signal.Signals) -> None:
    before = signal.signal(stop, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(stop)
        assert signal.getsignal(stop) == signal.SIG_DFL
        signal.signal(stop, signal.SIG_IGN)  # nohup
        with interruptible():
            signal.raise_signal(stop)
    finally:
        signal.signal(stop, before)


def test_other_threads_have_no_handlers() -> None:
    def enter() -> None:
        with interruptible():
            entered.append(True)

    entered: list[bool] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered
