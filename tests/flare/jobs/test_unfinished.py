"""Jobs of a server that was killed: closed when it starts again, and only then."""

from types import SimpleNamespace

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.private.fed.server.job_runner import JobRunner

from medflare.flare.jobs.unfinished import UnfinishedJobs


class Manager:
    """FLARE's, with a job in every state."""

    def __init__(self) -> None:
        self.states = {status.name: status for status in RunStatus}

    def get_jobs_by_status(self, states: list[RunStatus], fl_ctx: FLContext) -> list[SimpleNamespace]:
        return [SimpleNamespace(job_id=job) for job, state in self.states.items() if state in states]

    def set_status(self, job: str, state: RunStatus, fl_ctx: FLContext) -> None:
        self.states[job] = state


def test_what_ran_when_the_server_died_is_closed_when_it_starts() -> None:
    manager = Manager()
    components = {SystemComponents.JOB_MANAGER: manager}
    engine = SimpleNamespace(job_runner=JobRunner(workspace_root=""), get_component=components.get)
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    for event in (EventType.SYSTEM_START, EventType.START_RUN):
        UnfinishedJobs().handle_event(event, fl_ctx)
    assert all(state.name == job for job, state in manager.states.items())
    UnfinishedJobs().handle_event(EventType.SYSTEM_BOOTSTRAP, fl_ctx)
    changed = {job for job, state in manager.states.items() if state.name != job}
    assert changed == {"RUNNING", "DISPATCHED"} and manager.states["RUNNING"] is RunStatus.ABANDONED
