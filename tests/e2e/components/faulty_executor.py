"""An executor that misbehaves at chosen sites in round 1; goes into a job's app/custom/."""

import math
import os
import signal
import time
from typing import Any

from nvflare.apis.fl_context import FLContext

from medflare.core.message import Message
from medflare.flare.executors import FedAvgExecutor


class FaultyExecutor(FedAvgExecutor):
    """`faults`: site -> "raise", "nan", "slow" or "die"; `always`: in every round, not in round 1 alone."""

    def __init__(self, faults: dict[str, str], always: bool = False, seconds: float = 0.0, **settings: Any):
        super().__init__(**settings)
        self.faults, self.always, self.seconds = faults, always, seconds

    def _answer(self, phase: str, round: int, incoming: Message, fl_ctx: FLContext) -> Message:
        due = phase == "train" and (self.always or round == 1)
        fault = self.faults.get(fl_ctx.get_identity_name(), "") if due else ""
        if fault == "raise":
            raise ZeroDivisionError("division by zero")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            time.sleep(self.seconds)
        reply = super()._answer(phase, round, incoming, fl_ctx)
        if fault == "nan":
            next(iter(reply.states["model"].values())).view(-1)[0] = math.nan
        return reply
