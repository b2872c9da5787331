"""A site that trains nothing, so that a round costs what FLARE and medflare cost; goes into a job's app/custom/."""

import os
import threading

from nvflare.apis.fl_context import FLContext

from medflare.core.message import Message
from medflare.flare.executors import FedAvgExecutor


class IdleExecutor(FedAvgExecutor):
    """Sends the model back as it came, with the number of threads and the memory of its process."""

    def _answer(self, phase: str, round: int, incoming: Message, fl_ctx: FLContext) -> Message:
        if phase != "train":
            return super()._answer(phase, round, incoming, fl_ctx)
        usage = {"threads": threading.active_count(), "megabytes": resident_megabytes()}
        return Message(incoming.states, {"n_samples": 1, "loss": 0.0, "validation": {"global": 0.0}, **usage})


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
