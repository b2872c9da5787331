"""The contract of results.json, as a schema: what every reader of results may rely on.

Keys beyond those named here are allowed; nothing named here may be missing, and every number is finite or null.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from medflare.core.events import KINDS

Metrics = dict[str, float | None]  # an undefined metric is null, with the reason among the events
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    return kind


class _Open(BaseModel):
    """A mapping that may hold more than its named keys; numbers are neither parsed from text nor NaN."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Models(_Open):
    global_: Metrics = Field(alias="global")
    personal: Metrics
    deployed: Metrics


class Images(_Open):
    """Images of each split; null where the site never said."""

    train: Count | None
    validation: Count | None
    test: Count | None


class SiteResults(_Open):
    role: Literal["inside", "outside"]
    n: Images
    metrics: Models


class Means(_Open):
    """Unweighted means over the sites of a role; undefined values are left out."""

    inside: Models
    outside: Models


class Traffic(_Open):
    """Bytes of all tensors sent to sites and received from them."""

    down_bytes: Count
    up_bytes: Count


class Cost(Traffic):
    """What one site has moved over the wire, and how long it was at work for the run."""

    seconds: Annotated[float, Field(ge=0)]


class EventEntry(_Open):
    """One event of the run, see `core.events`."""

    round: int | None
    site: str | None
    kind: Annotated[str, AfterValidator(_known)]
    message: Text


class HyperParameters(_Open):
    """All hyper-parameters as they were used, each under the algorithm of the method that owns it."""

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
    method: Text
    task: Text
    seed: int
    rounds: Count
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
    """Check a results dict against the contract.

    Raises:
        ValueError: every violation by its place, on one line.
    """
    try:
        Results.model_validate(results)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, problem['loc'])) or 'results'}: {problem['msg']}" for problem in error.errors()]
        raise ValueError("results break their contract: " + "; ".join(found)) from None
