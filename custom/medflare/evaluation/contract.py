"""The contract of results.json, as a schema: what every reader of results may rely on.

Keys beyond those named here are allowed; nothing named here may be missing, and every number is finite or null.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medflare.core.events import KINDS

Metrics = dict[str, float | None]


class _Open(BaseModel):
    """A mapping that may hold more than its named keys; numbers are neither parsed from text nor NaN."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Models(_Open):
    """Metrics of each kind of model; an undefined metric is null, with the reason among the events."""

    global_: Metrics = Field(alias="global")
    personal: Metrics
    deployed: Metrics


class Counts(_Open):
    """Images of each split; null where the site never said."""

    train: int | None = Field(ge=0)
    validation: int | None = Field(ge=0)
    test: int | None = Field(ge=0)


class SiteResults(_Open):
    """One site's role, images and test metrics."""

    role: Literal["inside", "outside"]
    n: Counts
    metrics: Models


class Means(_Open):
    """Unweighted means over the sites of a role; undefined values are left out."""

    inside: Models
    outside: Models


class Traffic(_Open):
    """Bytes of all tensors sent to sites and received from them."""

    down_bytes: int = Field(ge=0)
    up_bytes: int = Field(ge=0)


class Cost(_Open):
    """What one site has moved over the wire, and how long it was at work for the run."""

    down_bytes: int = Field(ge=0)
    up_bytes: int = Field(ge=0)
    seconds: float = Field(ge=0)


class EventEntry(_Open):
    """One event of the run, see `core.events`."""

    round: int | None
    site: str | None
    kind: str
    message: str = Field(min_length=1)

    @model_validator(mode="after")
    def _known(self) -> "EventEntry":
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}")
        return self


class HyperParameters(_Open):
    """All hyper-parameters as they were used, each under the half of the method that owns it."""

    site: dict[str, Any]
    server: dict[str, Any]


class Configuration(_Open):
    """What a reader needs to repeat the run."""

    hyper: HyperParameters
    settings: dict[str, Any]
    task: dict[str, Any]


class Results(_Open):
    """The whole of results.json."""

    schema_: Literal[1] = Field(alias="schema")
    method: str = Field(min_length=1)
    task: str = Field(min_length=1)
    seed: int
    rounds: int = Field(ge=0)
    status: Literal["COMPLETED", "FAILED"]
    reason: str | None
    sites: dict[str, SiteResults]
    mean: Means
    traffic: Traffic
    seconds: dict[str, float]
    costs: dict[str, Cost] = Field(default_factory=dict)  # results of earlier versions have none
    events: list[EventEntry]
    versions: dict[str, str]
    configuration: Configuration

    @model_validator(mode="after")
    def _status_and_reason_agree(self) -> "Results":
        if (self.status == "FAILED") != bool(self.reason):
            raise ValueError(f"a failed run has a reason and a completed one has none, found {self.status} and {self.reason!r}")
        return self


def validate_results(results: Mapping[str, Any]) -> None:
    """Check a results dict against the contract, its means against its sites.

    Args:
        results: content of results.json.

    Raises:
        ValueError: every violation by its place, on one line.
    """
    try:
        Results.model_validate(results)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, problem['loc'])) or 'results'}: {problem['msg']}" for problem in error.errors()]
        raise ValueError("results break their contract: " + "; ".join(found)) from None
    wrong = [
        f"mean.{role}.{model}.{metric}: {value} is not the mean over the sites, {expected}"
        for role, models in results["mean"].items()
        for model, metrics in models.items()
        for metric, value in metrics.items()
        for expected in [_mean(results["sites"], role, model, metric)]
        if (value is None) != (expected is None) or (value is not None and not math.isclose(value, expected or 0.0, abs_tol=1e-9))
    ]
    if wrong:
        raise ValueError("results break their contract: " + "; ".join(wrong))


def _mean(sites: Mapping[str, Any], role: str, model: str, metric: str) -> float | None:
    """The mean in the plainest way, independent of the code that wrote it."""
    values = [site["metrics"].get(model, {}).get(metric) for site in sites.values() if site["role"] == role]
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
