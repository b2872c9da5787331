"""An executor that misbehaves at chosen sites in round 1; goes into a job's app/custom/."""

import math
import os
import signal
import time
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from medflare.flare.executors import FedAvgExecutor
from medflare.flare.messages import to_message, to_shareable


class FaultyExecutor(FedAvgExecutor):
    """`faults`: site -> "raise", "nan", "slow" or "die"; `always`: in every round, not in round 1 alone."""

    def __init__(self, faults: dict[str, str], always: bool = False, seconds: float = 0.0, **settings: Any):
        super().__init__(**settings)
        self.faults, self.always, self.seconds = faults, always, seconds

    def _reply(self, phase: str, round: int, incoming: Shareable, fl_ctx: FLContext) -> Shareable:
        due = phase == "train" and (self.always or round == 1)
        fault = self.faults.get(fl_ctx.get_identity_name(), "") if due else ""
        if fault == "raise":
            raise ZeroDivisionError("division by zero")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            time.sleep(self.seconds)
        reply = super()._reply(phase, round, incoming, fl_ctx)
        if fault != "nan":
            return reply
        message = to_message(reply)
        next(iter(message.states["model"].values())).view(-1)[0] = math.nan
        return to_shareable(message)
