"""The claims of docs/results.md: what a row deploys against its comparators in one study, with p adjusted within the claim."""

from dataclasses import dataclass
from typing import Final

from medflare.studies.statistics import holm
from medflare.studies.tables import Model, StudyTables, markdown, task_of

FEDAVG: Final = ("fedavg:reset_optimizer=false", "deployed")
ALONE: Final = ("single-site", "deployed")


@dataclass(frozen=True)
class Claim:
    """A row is better than each of these models, by name."""

    study: str
    row: str
    role: str
    comparators: tuple[tuple[str, Model], ...]
    metric: str = ""  # default: the task's


_FEDSM: Final = (("FedAvg", ("fedavg", "deployed")), ("single site", ALONE))
_PRR: Final = (
    ("alone with PRR's loss", ("single-site:method=prr", "deployed")),
    ("FedBN", ("prr:pfa=false,det=false,cpa=off", "deployed")),
)
_OUTSIDE: Final = (("FedAvg", FEDAVG),)
_INSIDE: Final = (("FedAvg", FEDAVG), ("single site", ALONE))
_GRACE: Final = "grace:reset_optimizer=false"
_FEDDAG: Final = {
    "ham10000_pretrained_out": "feddag:ema=0.9,reset_optimizer=false",
    "ham10000_features": "feddag:ndag=false,reset_optimizer=false",
    "ham10000_features_random": "feddag:ndag=false,ema=0.9,reset_optimizer=false",
    "ham10000_out": "feddag:ema=0.9,reset_optimizer=false",
    "brain_lgg_out": "feddag:ema=0.9,reset_optimizer=false",
}
CLAIMS: Final = (
    Claim("fundus_fedsm", "fedsm", "inside", _FEDSM),
    # The global model of FedSM is FedAvg's.
    Claim("brain_lgg_3d", "fedsm", "inside", (("FedAvg", ("fedsm", "global")), ("single site", ALONE))),
    Claim("brain_lgg", "fedsm", "inside", _FEDSM),
    *(Claim(study, "prr", "inside", _PRR) for study in ("ham10000_prr", "ham10000_prr_7", "ham10000_prr_features")),
    *(Claim(study, _GRACE, "outside", _OUTSIDE) for study in _FEDDAG),
    *(Claim(study, _GRACE, "inside", _INSIDE) for study in _FEDDAG),
    *(Claim(study, _GRACE, "outside", _OUTSIDE, "balanced_accuracy") for study in _FEDDAG if study != "brain_lgg_out"),
    *(Claim(study, row, "outside", _OUTSIDE) for study, row in _FEDDAG.items()),
)
_COLUMNS: Final = "study|row|metric|sites|comparator|difference|over seeds|p, Holm|detectable|over patients|d|verdict"


def claim_lines(claim: Claim, study: StudyTables) -> list[list[str]]:
    """A line for every comparator."""
    study.metric = claim.metric or task_of(study.groups)["metric"]
    compared = []
    for name, model in claim.comparators:
        difference = study.difference(model, (claim.row, "deployed"), claim.role)
        assert difference is not None, f"{claim.study}: no difference of {claim.row} to {name}"
        compared.append((name, difference))
    adjusted = holm([difference.over_seeds.p for _, difference in compared])
    lines = []
    for (name, difference), p in zip(compared, adjusted, strict=True):
        role, gain, seeds, _, _, patients, _, _, of_claim, detectable, margin, verdict = difference.cells(p, judged=True)
        about = [claim.study, f"`{claim.row}`", study.metric, role, name]
        lines.append([*about, gain, seeds, of_claim, detectable, patients, margin, verdict])
    return lines


def claims_table(lines: list[list[str]]) -> str:
    return markdown([_COLUMNS.split("|"), *lines], left=5)
