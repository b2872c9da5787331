"""A site that trains nothing, so that a round costs what FLARE and medflare cost; goes into a job's app/custom/."""

import json
import os
import threading
from pathlib import Path

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from medflare.flare.executors import FedAvgExecutor
from medflare.flare.messages import META

USAGE = "usage.jsonl"  # in the site's folder of the job: threads and megabytes of its process, a line a round


class IdleExecutor(FedAvgExecutor):
    """Sends the model back as it came, and notes the number of threads and the memory of its process."""

    images = 0

    def _reply(self, phase: str, round: int, incoming: Shareable, fl_ctx: FLContext) -> Shareable:
        if phase != "train":
            reply = super()._reply(phase, round, incoming, fl_ctx)
            if phase == "enrol":
                self.images = from_shareable(reply).data[META].data["n"]["train"]
            return reply
        with (
            Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())) / USAGE
        ).open("a") as file:
            file.write(
                json.dumps({"threads": threading.active_count(), "megabytes": resident_megabytes()})
                + "\n"
            )
        parts = from_shareable(incoming).data
        parts[META] = DXO(
            DataKind.METRICS, {"n_samples": self.images, "loss": 0.0, "validation": {"global": 0.0}}
        )
        return DXO(DataKind.COLLECTION, parts).to_shareable()


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
