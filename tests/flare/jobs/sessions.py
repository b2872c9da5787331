"""A federation's server as a lead's session shows it, without processes: jobs in states that change from look to look."""

from collections.abc import Callable, Mapping
from typing import Any

from nvflare.fuel.flare_api.api_spec import JobNotRunning, MonitorReturnCode


def job(
    identity: str, name: str = "fedsm-brain", status: str = "RUNNING", **more: Any
) -> dict[str, Any]:
    """What FLARE says of a job in a list with all details."""
    times = {"submit_time_iso": "2026-11-22T08:15:30+00:00", "duration": "0:01:05.123456"}
    return {
        "job_id": identity,
        "name": name,
        "status": status,
        "submitter_name": "lead@coordination.org",
        **times,
        **more,
    }


class Served:
    """The session: states, stats and history look by look, of which the last state stays; the server's log; how the job was deployed."""

    def __init__(
        self,
        *states: str,
        stats: tuple[Mapping[str, Any], ...] = (),
        log: str = "",
        details: tuple[str, ...] = (),
        history: tuple[list[str], ...] = (),
    ):
        self.states, self.stats, self.log, self.details, self.history = (
            states,
            stats,
            log,
            details,
            history,
        )
        self.looks = 0

    def get_job_meta(self, identity: str) -> dict[str, Any]:
        status = self.states[min(self.looks, len(self.states) - 1)]
        tried = self.history[self.looks] if self.history else []
        return job(
            identity, status=status, job_deploy_detail=list(self.details), schedule_history=tried
        )

    def show_stats(self, identity: str, target: str) -> dict[str, Any]:
        if self.looks >= len(self.stats):
            raise JobNotRunning("job is not running")
        return {target: {"ServerRunner": {"status": "started"}, **self.stats[self.looks]}}

    def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
        return [job("id")]

    def get_job_logs(self, identity: str) -> dict[str, Any]:
        return {"logs": {"server": self.log}}

    def list_job_components(self, identity: str) -> list[str]:
        return []

    def monitor_job_and_return_job_meta(
        self, identity: str, timeout: float, every: float, look: Callable[..., bool]
    ) -> tuple[MonitorReturnCode, dict[str, Any] | None]:
        while True:
            meta = self.get_job_meta(identity)
            if not look(self, identity, meta):
                return MonitorReturnCode.ENDED_BY_CB, None
            if meta["status"].startswith("FINISHED"):
                return MonitorReturnCode.JOB_FINISHED, meta
            self.looks += 1
            if timeout and self.looks >= timeout:
                return MonitorReturnCode.TIMEOUT, None
