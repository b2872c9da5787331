"""Jobs that an earlier life of the server left unfinished: FLARE would call them running for ever, and nobody could end them."""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext


class UnfinishedJobs(FLComponent):
    """Closes them as FINISHED:ABANDONED when the server starts, before it runs any job; `medflare resume` takes them up as before.

    A component of the server itself: one line in its local/resources.json.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The server comes up: none of the jobs that are marked as running has a process."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            fl_ctx.get_engine().job_runner.update_unfinished_jobs(fl_ctx)
