"""An executor whose site does something wrong in every round, each time something else."""

import math
from typing import Any

import torch

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


class MisbehavingExecutor(FedAvgExecutor):
    """FedAvg's site algorithm with the fault number `round` of `FAULTS` in every answer to "train" of the site `victim`."""

    def __init__(self, victim: str = "", **options: Any):
        super().__init__(**options)
        self.victim = victim

    def _reply(self, phase: str, round: int, incoming: Any, fl_ctx: Any) -> Any:
        fault = FAULTS[round] if phase == "train" and fl_ctx.get_identity_name() == self.victim and round < len(FAULTS) else ""
        if fault == "exception":
            raise ZeroDivisionError("the scanner's bias field is zero")
        reply = super()._reply(phase, round, incoming, fl_ctx)
        if not fault:
            return reply
        message = to_message(reply)
        spoil(message, fault)
        return to_shareable(message)


def spoil(message: Any, fault: str) -> None:
    """One tensor, or one number, of the answer becomes what it must not be."""
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
