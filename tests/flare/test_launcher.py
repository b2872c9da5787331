"""A killed job process is replaced, a few times; one that was asked to stop, or failed by itself, is not."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

from medflare.flare.launcher import RestartingHandle


class Processes:
    """Starts the given programs one after the other."""

    def __init__(self, *programs: str):
        self.programs = list(programs)
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self) -> ProcessHandle:
        program = self.programs[min(len(self.started), len(self.programs) - 1)]
        self.started.append(
            subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        )
        return ProcessHandle(process=self.started[-1])


DIES = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("programs", "started", "code"),
    [
        ((DIES, DIES, "pass"), 3, JobReturnCode.SUCCESS),
        # FLARE would end the job for all sites on an execution error.
        ((DIES,), 3, JobReturnCode.UNKNOWN),
        (("raise SystemExit(1)",), 1, JobReturnCode.EXECUTION_ERROR),
    ],
)
def test_a_killed_process_is_replaced_at_most_twice(
    programs: tuple[str, ...], started: int, code: Any
) -> None:
    start = Processes(*programs)
    handle = RestartingHandle(start, restarts=2)
    handle.wait()
    assert len(start.started) == started and handle.poll() == code


def test_a_process_that_was_asked_to_stop_stays_stopped() -> None:
    start = Processes("import time; time.sleep(60)")
    handle = RestartingHandle(start, restarts=2)
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    time.sleep(0.3)
    handle.terminate()
    waiting.join(60)
    assert not waiting.is_alive() and len(start.started) == 1
