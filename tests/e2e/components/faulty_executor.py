"""An executor that does something wrong at chosen sites; goes into a job's app/custom/."""

import math
import os
import signal
import time
from typing import Any

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from medflare.flare.executors import FedAvgExecutor
from medflare.flare.messages import to_message, to_shareable

FAULTS = (
    "nan",
    "huge",
    "missing_key",
    "extra_key",
    "wrong_shape",
    "no_samples",
    "negative_samples",
    "nan_samples",
    "nan_metric",
    "exception",
    "extra_entry",
    "tensor_in_facts",
)


class FaultyExecutor(FedAvgExecutor):
    """FedAvg's site algorithm with faults in its replies to "train".

    Args:
        faults: site -> one of `FAULTS` in each round; "all": fault number `round` of them; "slow" or "die": in round 1.
        seconds: that a slow reply takes longer.
    """

    def __init__(self, faults: dict[str, str], seconds: float = 0.0, **settings: Any):
        super().__init__(**settings)
        self.faults, self.seconds = faults, seconds

    def _reply(self, phase: str, round: int, incoming: Shareable, fl_ctx: FLContext) -> Shareable:
        fault = self.faults.get(fl_ctx.get_identity_name(), "") if phase == "train" else ""
        if fault == "all":
            fault = FAULTS[round]
        if fault == "die" and round == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow" and round == 1:
            time.sleep(self.seconds)
        if fault == "exception":
            raise ZeroDivisionError("the scanner's bias field is zero")
        reply = super()._reply(phase, round, incoming, fl_ctx)
        if fault not in FAULTS:
            return reply
        message = to_message(reply)
        spoil(message, fault)
        return to_shareable(message)


def spoil(message: Any, fault: str) -> None:
    """One tensor, or one number, of the reply becomes what it must not be."""
    model = message.states["model"]
    name = next(name for name, tensor in model.items() if tensor.is_floating_point())
    if fault == "nan":
        model[name].view(-1)[0] = math.nan
    elif fault == "huge":
        model[name].view(-1)[0] = 1e30
    elif fault == "missing_key":
        del model[name]
    elif fault == "extra_key":
        model["patients"] = torch.ones(3)
    elif fault == "wrong_shape":
        model[name] = model[name][:1]
    elif fault == "extra_entry":
        message.states["images"] = {"scan": torch.ones(2, 2)}
    elif fault == "tensor_in_facts":
        message.meta["weights"] = torch.ones(3)
    elif fault == "nan_metric":
        message.meta["validation"] = {"global": math.nan}
    else:
        message.meta["n_samples"] = {"no_samples": 0, "negative_samples": -5, "nan_samples": math.nan}[fault]
