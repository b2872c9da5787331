"""The names under which a job shows what it runs: for every paper its executor, its aggregator and its recipe, made from one table.

A method without a name of its own runs under the general class, told its name: `MedflareExecutor(method="moon")`. What a party's
`class_allow_list` holds follows from the same table (`COMPONENTS`): every class that a job of ours names, by its full name.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

C = TypeVar("C")


class Names(NamedTuple):
    """The classes of one method; "" where the general one serves.

    Attributes:
        executor: below `medflare.flare.executors`.
        aggregator: below `medflare.flare.aggregators`; also of every method whose server algorithm is derived from this one's.
        recipe: below `medflare.flare.recipes`.
    """

    executor: str = ""
    aggregator: str = ""
    recipe: str = ""


NAMES: Final[dict[str, Names]] = {
    "fedavg": Names("FedAvgExecutor", "WeightedAggregator", "FedAvgRecipe"),
    "fedsm": Names("FedSMExecutor", "SoftPullAggregator", "FedSMRecipe"),
    "prr": Names("PRRExecutor", "FourierAggregator", "PRRRecipe"),
    "grace": Names("GraceExecutor", "ConsistencyAggregator", "GraceRecipe"),
    "iop_fl": Names("IOPExecutor", "", "IOPRecipe"),
    "feddag": Names("FedDAGExecutor", "", "FedDAGRecipe"),
    "sha": Names("", "SharpnessAggregator", ""),
}

REFUSED, BUILT = "medflare.component.refused", "medflare.component.built"  # actions in a party's audit.log, see `components`
_HERE: Final = __name__.rpartition(".")[0]
# kind of the party -> full names of the classes that jobs without code may name there.
COMPONENTS: Final[dict[str, tuple[str, ...]]] = {
    "site": tuple(f"{_HERE}.executors.{name}" for name in ("MedflareExecutor", *(of.executor for of in NAMES.values() if of.executor))),
    "server": (
        f"{_HERE}.controller.MedflareController",
        *(f"{_HERE}.aggregators.{name}" for name in ("MethodAggregator", *(of.aggregator for of in NAMES.values() if of.aggregator))),
        f"{_HERE}.tracking.MLflowTracker",
        "nvflare.app_common.widgets.metrics_artifact_writer.MetricsArtifactWriter",
        "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver",
    ),
}


def named_classes(base: type[C], column: str, module: str) -> dict[str, type[C]]:
    """method -> class derived from `base` that bears the method's name in a column of the table and has it as its default."""
    found: dict[str, type[C]] = {}
    for method, names in NAMES.items():
        if name := getattr(names, column):
            text = f"`{base.__name__}` of the method {method}."
            found[method] = type(name, (base,), {"default_method": method, "__module__": module, "__doc__": text})
    return found


def by_name(module: str, classes: Mapping[str, type[C]], name: str) -> type[C]:
    """What a module's `__getattr__` answers: the named class that a job spells `module.name`.

    Raises:
        AttributeError: there is none.
    """
    for named in classes.values():
        if named.__name__ == name:
            return named
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
