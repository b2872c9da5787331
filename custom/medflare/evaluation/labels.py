"""The metrics of a model in a results dict: those of the model, and those of its structures or classes."""

from collections.abc import Iterator, Mapping
from typing import Any

STRUCTURES, CLASSES = "structures", "classes"  # beside a model's metrics: label -> metric -> value


def named_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of a model, without those of its structures and classes."""
    return {metric: value for metric, value in metrics.items() if metric not in (STRUCTURES, CLASSES)}


def labels_of(site: Mapping[str, Any], model: str) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Every structure or class of a model at a site, its metrics and their intervals."""
    for kind in (STRUCTURES, CLASSES):
        for label, values in site["metrics"].get(model, {}).get(kind, {}).items():
            yield label, values, site.get("intervals", {}).get(model, {}).get(kind, {}).get(label, {})
