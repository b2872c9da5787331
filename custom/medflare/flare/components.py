"""The components that medflare puts into a party's local/resources.json; `JobComponents` is in
`job_policy`.
"""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from medflare.flare.job_policy import JobComponents  # noqa: F401


class UnfinishedJobs(FLComponent):
    """A component of the server that marks jobs that a killed server left as running
    FINISHED:ABANDONED.

    FLARE would call them running for ever. It is one line in the server's local/resources.json.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Mark the jobs when the server starts, as no job has a process then."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            fl_ctx.get_engine().job_runner.update_unfinished_jobs(fl_ctx)
