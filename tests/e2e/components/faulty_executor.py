"""An executor that does something wrong at chosen sites; goes into a job's app/custom/."""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from medflare.core.message import Message
from medflare.flare.executors import FedAvgExecutor
from medflare.flare.messages import to_message, to_shareable

# What one tensor, or one number, of the reply becomes that it must not be; "exception" comes before there is a reply.
FAULTS: dict[str, Callable[[Message], object]] = {
    "nan": lambda reply: first(reply).view(-1)[0].fill_(math.nan),
    "huge": lambda reply: first(reply).view(-1)[0].fill_(1e30),
    "missing_key": lambda reply: reply.states["model"].pop(name_of_first(reply)),
    "extra_key": lambda reply: reply.states["model"].update(patients=torch.ones(3)),
    "wrong_shape": lambda reply: reply.states["model"].update(
        {name_of_first(reply): first(reply)[:1]}
    ),
    "no_samples": lambda reply: reply.meta.update(n_samples=0),
    "negative_samples": lambda reply: reply.meta.update(n_samples=-5),
    "nan_samples": lambda reply: reply.meta.update(n_samples=math.nan),
    "nan_metric": lambda reply: reply.meta.update(validation={"global": math.nan}),
    "exception": lambda reply: None,
    "extra_entry": lambda reply: reply.states.update(images={"scan": torch.ones(2, 2)}),
    "tensor_in_facts": lambda reply: reply.meta.update(weights=torch.ones(3)),
}


def name_of_first(reply: Message) -> str:
    return next(
        name for name, tensor in reply.states["model"].items() if tensor.is_floating_point()
    )


def first(reply: Message) -> torch.Tensor:
    return reply.states["model"][name_of_first(reply)]


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
            fault = list(FAULTS)[round]
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
        FAULTS[fault](message)
        return to_shareable(message)
