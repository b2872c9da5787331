"""Names that parties agree on.

These are the classes that a job without code may name, a job's files, and the actions in audit.log.
"""

from typing import Final

TASK_FILE: Final = "task.json"  # in the job's config folder

# Actions in a party's audit.log, see `components`.
REFUSED: Final = "medflare.component.refused"
BUILT: Final = "medflare.component.built"

# Kind of the party -> full names of the classes that a job without code may name there.
COMPONENTS: Final[dict[str, tuple[str, ...]]] = {
    "site": (
        "medflare.flare.executors.MedflareExecutor",
        "medflare.flare.executors.FedAvgExecutor",
        "medflare.flare.executors.FedSMExecutor",
        "medflare.flare.executors.PRRExecutor",
        "medflare.flare.executors.GraceExecutor",
        "medflare.flare.executors.IOPExecutor",
        "medflare.flare.executors.FedDAGExecutor",
    ),
    "server": (
        "medflare.flare.controller.MedflareController",
        "medflare.flare.aggregators.MethodAggregator",
        "medflare.flare.aggregators.WeightedAggregator",
        "medflare.flare.aggregators.SoftPullAggregator",
        "medflare.flare.aggregators.FourierAggregator",
        "medflare.flare.aggregators.ConsistencyAggregator",
        "medflare.flare.aggregators.SharpnessAggregator",
        "medflare.flare.tracking.MLflowTracker",
    ),
}
