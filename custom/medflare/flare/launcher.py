"""Starts a site's job process, and starts it again when it is killed: out of memory, by hand, by a batch system.

FLARE's own launcher reports a killed process as a failed one, and the server ends the whole job for all hospitals. Here the
process is replaced, a few times; what the site remembers lies on disk, so that the new process answers what the killed one
was asked. After that the site counts as gone and the federation's own rules decide (`min_sites`). Used by the "process_launcher"
of a site's resources.json.
"""

import logging
from collections.abc import Callable

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

_log = logging.getLogger(__name__)


class RestartingHandle(JobHandleSpec):
    """A job process that is replaced when a signal ends it.

    Args:
        start: starts the process.
        restarts: how often.
    """

    def __init__(self, start: Callable[[], ProcessHandle], restarts: int):
        super().__init__()
        self._start = start
        self._left = restarts
        self._stopped = False
        self._process = start()

    def terminate(self) -> None:
        """End the process for good."""
        self._stopped = True
        self._process.terminate()

    def poll(self) -> str | int:
        """FLARE's code for how the process ended; "unknown" for one that was killed, which FLARE takes for no failure of the job."""
        return JobReturnCode.UNKNOWN if self._killed() else self._process.poll()

    def wait(self) -> None:
        """Returns when the process has ended and is not started again."""
        self._process.wait()
        while self._killed() and self._left:
            self._left -= 1
            _log.warning("the job's process was killed; starting it again, %d more times if need be", self._left)
            self._process = self._start()
            if self._stopped:  # asked to stop in between
                self._process.terminate()
            self._process.wait()

    def _killed(self) -> bool:
        code = self._process.adapter.poll()
        return not self._stopped and code is not None and code < 0


class RestartingLauncher(ClientProcessJobLauncher):
    """Job launcher of a site.

    Args:
        restarts: how often the process of one job is started again after it was killed.
    """

    def __init__(self, restarts: int = 2):
        super().__init__()
        self.restarts = restarts

    def launch_job(self, job_meta: dict, fl_ctx: FLContext) -> RestartingHandle:
        """Start the job's process, with FLARE's own launcher, under a handle that replaces it when it is killed."""
        launch = super().launch_job
        return RestartingHandle(lambda: launch(job_meta, fl_ctx), self.restarts)
