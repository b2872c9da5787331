"""A site's job launcher: starts a job process again if a signal kills it, for example for a lack of
memory, by a batch system or a person.

FLARE's own launcher reports a killed process as failed, and the server ends the job for all sites.
Here the process is started again a few times; the site's state is on disk, so the new process
answers the same request. After that the site counts as lost, and `min_sites` decides.
"process_launcher" in a site's resources.json names the class.
"""

import logging
from collections.abc import Callable

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

_log = logging.getLogger(__name__)


class RestartingHandle(JobHandleSpec):
    """A job process that is started again when a signal ends it, at most `restarts` times."""

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
        """FLARE's return code; UNKNOWN for a killed process, which FLARE does not take for a
        failure of the job.
        """
        if self._killed():
            return JobReturnCode.UNKNOWN
        return self._process.poll()

    def wait(self) -> None:
        """Return when the process has ended and is not started again."""
        self._process.wait()
        while self._killed() and self._left:
            self._left -= 1
            _log.warning(
                "the job's process was killed; starting it again, at most %d more times", self._left
            )
            self._process = self._start()
            if self._stopped:  # `terminate` was called meanwhile
                self._process.terminate()
            self._process.wait()

    def _killed(self) -> bool:
        code = self._process.adapter.poll()
        return not self._stopped and code is not None and code < 0


class RestartingLauncher(ClientProcessJobLauncher):
    """FLARE's launcher with `RestartingHandle`."""

    def __init__(self, restarts: int = 2):
        super().__init__()
        self.restarts = restarts

    def launch_job(self, job_meta: dict, fl_ctx: FLContext) -> RestartingHandle:
        """FLARE calls this to start a job's process."""
        launch = super().launch_job
        return RestartingHandle(lambda: launch(job_meta, fl_ctx), self.restarts)
