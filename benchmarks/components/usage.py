"""What a process and all below it have used so far; light to import, since a job carries it into FLARE's processes."""

import time

import psutil

_own = 0.0  # processor seconds of the looking itself, which are nobody's cost


def usage() -> dict[str, float]:
    """Of this process and everything that it has started.

    Returns:
        "processor": seconds so far, those of processes that have ended and were waited for among them; "megabytes": memory now, pages that
        several processes share counted once; "threads" and "processes" now; "written": bytes handed to files and pipes by those that live.
    """
    global _own
    started = time.thread_time()
    found = dict.fromkeys(("processor", "megabytes", "threads", "processes", "written"), 0.0)
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
            threads = process.num_threads()
            written = process.io_counters().write_chars
            memory = process.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile
            continue
        found["processor"] += (
            times.user + times.system + times.children_user + times.children_system
        )
        found["megabytes"] += memory / 2**20
        found["threads"] += threads
        found["processes"] += 1
        found["written"] += written
    found["processor"] -= _own
    _own += time.thread_time() - started
    return found
