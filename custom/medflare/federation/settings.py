"""The settings of a run beside its method and task: one list for Python, the command line, jobs and
results.
"""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from medflare.core.settings import checked, strict_dataclass
from medflare.core.text import Json, JsonDict

ENROL = "enrol"
FINALIZE = "finalize"
CROSS_SITE = "cross_site"
BUILTIN_PHASES = (ENROL, FINALIZE, CROSS_SITE)  # of every run, whatever the method
STATE = "state"  # folder in a site's folder: its state between two steps
# Bytes of JSON in a message: enough for counts and metrics, not for a model.
META_LIMIT = 65_536
Seconds = NonNegativeFloat


def step_name(phase: str, round: int, rounds: int | None = None) -> str:
    """A step in words; rounds count from 1, as in progress lines.

    Args:
        round: 0-based; `rounds` for a step after the last round.
        rounds: of the run; None: not known.

    Examples:
        >>> step_name("train", 0), step_name("validate", 2, rounds=2), step_name("finalize", 2)
        ("'train' of round 1", "'validate' after round 2", "'finalize'")
    """
    if phase in (FINALIZE, CROSS_SITE) or rounds == 0:
        return f"'{phase}'"
    if rounds is None or round < rounds:
        return f"'{phase}' of round {round + 1}"
    return f"'{phase}' after round {rounds}"


@strict_dataclass
class Rules:
    """How a federation treats its members.

    Attributes:
        min_sites: usable replies that a step needs, and sites that have to enroll; None: two, or
            one in a federation of one, and all that are there have to enroll.
        sites_per_round: inside sites drawn for a round; None: all.
        max_client_weight: maximum fraction of all training images, and of a rule's weights, that
            one site counts for; geometric, grace, sha and feddag may exceed it. None: no maximum.
        outlier_policy: an update against all others is "used", with an event, or "rejected".
        patience: training stops after so many rounds in which no validated model became better by
            the median over the sites (see `parts.selection.plateau`); the best round is used in any
            case. None: all rounds.
        adapt: adaptation with which every site also tests its deployed model, NAME or
            NAME,ARGUMENT=VALUE: dsbn, tent, sar, memo, ttt, labelshift, routing; or none.
        cross_site: in the end every site tests the personal models of the sites that share theirs
            (`share_model` in local/medflare.json).
    """

    _: dataclasses.KW_ONLY
    min_sites: PositiveInt | None = None
    sites_per_round: PositiveInt | None = None
    max_client_weight: Annotated[float, Field(gt=0, le=1)] | None = None
    outlier_policy: Literal["used", "rejected"] = "used"
    patience: PositiveInt | None = None
    adapt: str = "none"
    cross_site: bool = False


@strict_dataclass
class RunSettings(Rules):
    """The settings of a run.

    Attributes:
        rounds: of the federation, in commands 10 by default; 0 only tests a model to start from,
            see `preflight.check_run`.
        seed: of everything that is random, in commands 0 by default.
        outside: names of sites that do not train and only receive the final models.
        step_timeout: seconds after which a step continues without the missing sites; 0, the
            default: no timeout.
        enrol_timeout: seconds that sites have to read their images and enroll; the run starts with
            those that are ready. 0: no timeout.
        heartbeat_timeout: seconds without a heartbeat after which a site counts as gone.
        resume: id of the interrupted job that this one resumes.
    """

    _: dataclasses.KW_ONLY
    rounds: NonNegativeInt
    seed: int
    outside: tuple[str, ...] = ()
    step_timeout: Seconds = 0.0
    enrol_timeout: Seconds = 3600.0
    heartbeat_timeout: Seconds = 120.0
    resume: str = ""

    def to_dict(self) -> JsonDict:
        """JSON values by name."""
        values = {name: getattr(self, name) for name in RUN_SETTINGS}
        values["outside"] = list(self.outside)
        return values


# A resumed run may have others.
WAITS = ("step_timeout", "enrol_timeout", "heartbeat_timeout")
RULES = tuple(field.name for field in dataclasses.fields(Rules))
RUN_SETTINGS = ("rounds", "seed", "outside", *RULES, *WAITS, "resume")


def run_settings(values: Json) -> RunSettings:
    """The checked settings of a run from JSON values.

    Raises:
        ConfigError: a setting is unknown, missing, of another type or outside its range.
    """
    return checked(RunSettings, values, "run")
