"""A site that trains nothing, so that a round costs what FLARE and medflare cost; goes into a job's app/custom/."""

import os
import threading

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from medflare.flare.exchange.wire import FACTS
from medflare.flare.executors import FedAvgExecutor


class IdleExecutor(FedAvgExecutor):
    """Sends the model back as it came, with the number of threads and the memory of its process."""

    def _reply(self, phase: str, round: int, incoming: Shareable, fl_ctx: FLContext) -> Shareable:
        if phase != "train":
            return super()._reply(phase, round, incoming, fl_ctx)
        usage = {"threads": threading.active_count(), "megabytes": resident_megabytes()}
        parts = from_shareable(incoming).data
        parts[FACTS] = DXO(DataKind.METRICS, {"n_samples": 1, "loss": 0.0, "validation": {"global": 0.0}, **usage})
        return DXO(DataKind.COLLECTION, parts).to_shareable()


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
