"""A workflow and an executor that do nothing, so that a task costs what FLARE's simulator costs; goes into a job's app/custom/."""

import json
import time
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

SECONDS = "seconds.json"  # in the server's folder of the job: of every round


class NoopController(Controller):
    """Asks all sites for nothing, `rounds` times."""

    def __init__(self, rounds: int = 3):
        super().__init__(task_check_period=0.1)
        self.rounds = rounds

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Nothing."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        seconds = []
        for _ in range(self.rounds):
            started = time.monotonic()
            sites = len(self._engine.get_clients())
            self.broadcast_and_wait(
                Task("noop", Shareable()), fl_ctx, min_responses=sites, abort_signal=abort_signal
            )
            seconds.append(time.monotonic() - started)
        folder = Path(self._engine.get_workspace().get_run_dir(fl_ctx.get_job_id()))
        (folder / SECONDS).write_text(json.dumps(seconds))


class NoopExecutor(Executor):
    """Answers at once."""

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        return make_reply(ReturnCode.OK)
