"""Notes after every step of a job what all processes of FLARE's simulator have used; goes into a job's app/custom/, beside usage.py."""

import json
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_event_type import AppEventType
from usage import usage  # type: ignore[import-not-found]  # lies beside this file in app/custom/ alone

USAGE = "usage.jsonl"  # in the server's folder of the job


class UsageWidget(FLComponent):
    """Component of the server, in whose process the simulator's others begin."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Write a line after the server has aggregated."""
        if event_type == AppEventType.AFTER_AGGREGATION:
            folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
            with (folder / USAGE).open("a") as file:
                file.write(json.dumps(usage()) + "\n")
