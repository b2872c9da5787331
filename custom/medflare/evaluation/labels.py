"""The metrics of a model in a results dict: those of the model, and those of its structures or
classes.
"""

from collections.abc import Iterator

from medflare.core.text import Json

# Beside a model's metrics: label -> metric -> value.
STRUCTURES = "structures"
CLASSES = "classes"


def task_metric(results: Json) -> str:
    """The metric that selects models; "" for a task that could not be read."""
    return results["configuration"]["task"].get("metric", "")


def named_metrics(metrics: Json) -> dict[str, float | None]:
    """The metrics of a model, without those of its structures and classes."""
    named = dict(metrics)
    named.pop(STRUCTURES, None)
    named.pop(CLASSES, None)
    return named


def labels_of(site: Json, model: str) -> Iterator[tuple[str, Json, Json]]:
    """Every structure or class of a model at a site, its metrics and their intervals."""
    metrics = site["metrics"].get(model, {})
    intervals = site.get("intervals", {}).get(model, {})
    for kind in (STRUCTURES, CLASSES):
        for label, values in metrics.get(kind, {}).items():
            yield label, values, intervals.get(kind, {}).get(label, {})
