"""What a run fixes beside its method and its task: one list, spelt the same in Python, on the command line, in jobs and in results."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.settings import STRICT, checked

ENROL, FINALIZE = "enrol", "finalize"
PHASES_OF_ALL: Final = (ENROL, FINALIZE)  # of every run: answered by the participant, whatever the method
FACTS_LIMIT: Final = 65_536  # bytes of JSON in a message: room for counts and metrics, none for a model
Sites = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Rules:
    """How a federation treats its members.

    Attributes:
        min_sites: usable answers that a step needs; None: two, or one in a federation of one.
        sites_per_round: how many inside sites are drawn for a round; None: all.
        max_client_weight: of all training images, the share that a site counts for at most, whatever it has; None: what it has.
        outlier_policy: an update against all others, which may be a lie or another kind of patients, is "used" and an event, or "rejected".
        patience: training ends after so many rounds in which no model that the sites validate has become better by the median over the
            sites, see `parts.selection.plateau`; the best round is delivered as always. None: all rounds.
        transport_dtype: how kernels and matrices of the network travel between server and sites: "fp32", or in half the bytes "bf16",
            see `update_validation.rounding`. The final models travel in fp32.
    """

    min_sites: Sites | None = None
    sites_per_round: Sites | None = None
    max_client_weight: Share | None = None
    outlier_policy: Literal["used", "rejected"] = "used"
    patience: Annotated[int, Field(ge=1)] | None = None
    transport_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class RunSettings(Rules):
    """The settings of a federation's run.

    Attributes:
        rounds: of the federation; 0 trains nothing, see `preflight.check_run`.
        seed: of everything that is drawn.
        outside: names of sites that never train and only receive the final models.
        step_timeout: seconds after which a step goes on without the sites that have not answered; 0 waits for all that live.
        enrol_timeout: seconds that sites have to read their images and say what they have; the run begins with who is ready by then, or
            fails and names who is missing; 0 waits for all that live.
        heartbeat_timeout: seconds without a sign of life after which a site counts as gone.
        resume: id of the interrupted job that this one takes up at the last step that it finished.
    """

    rounds: Annotated[int, Field(ge=0)]
    seed: int
    outside: tuple[str, ...] = ()
    step_timeout: Seconds = 0.0
    enrol_timeout: Seconds = 3600.0
    heartbeat_timeout: Seconds = 120.0
    resume: str = ""

    def to_dict(self) -> dict[str, Any]:
        """By name, as JSON has them."""
        return {name: list(self.outside) if name == "outside" else getattr(self, name) for name in RUN_SETTINGS}


WAITS: Final = ("step_timeout", "enrol_timeout", "heartbeat_timeout")  # of the server for its sites; a run may be taken up with others
RULES: Final = tuple(field.name for field in dataclasses.fields(Rules))
_OWN: Final = tuple(field.name for field in dataclasses.fields(RunSettings) if field.name not in RULES)
RUN_SETTINGS: Final = (*_OWN[:3], *RULES, *_OWN[3:])


def run_settings(values: Mapping[str, Any]) -> RunSettings:
    """The settings, checked.

    Args:
        values: name -> value of the fields of `RunSettings`.

    Raises:
        ConfigError: one that is unknown, missing, of another type or outside its range.
    """
    return checked(RunSettings, values, "run")
