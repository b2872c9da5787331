"""The claims of docs/results.md: what a row deploys against its comparators in one study, with p adjusted within the claim."""

from copy import copy
from dataclasses import dataclass
from typing import Final

from medflare.studies.differences import Model, difference_of
from medflare.studies.further_models import BEST_EXPERT
from medflare.studies.runs import task_of
from medflare.studies.statistics import ALL_SITES, holm
from medflare.studies.tables import StudyTables

FEDAVG: Final = ("fedavg:reset_optimizer=false", "deployed")
ALONE: Final = ("single-site", "deployed")


@dataclass(frozen=True)
class Claim:
    """A row's model is better than each of these models, by name."""

    study: str
    row: str
    role: str
    comparators: tuple[tuple[str, Model], ...]
    metric: str = ""  # default: the task's
    model: str = "deployed"


_FEDSM: Final = (("FedAvg", ("fedavg", "deployed")), ("single site", ALONE))
_PRR: Final = (
    ("alone with PRR's loss", ("single-site:method=prr", "deployed")),
    ("FedBN", ("prr:pfa=false,det=false,cpa=off", "deployed")),
)
WITHOUT_CPA: Final = "prr:cpa=off"
ALONE_WITHOUT_CPA: Final = "single-site:method=prr,cpa=off"


def transfer(study: str) -> Claim:
    """What personal models gain by the deputy where the loss counts no classes: those of all sites
    in PRR, a site's own in training alone.
    """
    comparator = ("alone, without CPA", (ALONE_WITHOUT_CPA, "personal"))
    return Claim(study, WITHOUT_CPA, "inside", (comparator,), model="personal")


_OUTSIDE: Final = (("FedAvg", FEDAVG),)
_INSIDE: Final = (("FedAvg", FEDAVG), ("single site", ALONE))
IOP: Final = "iop_fl:comparisons=true,reset_optimizer=true"


def _beside_routing(row: str) -> tuple[tuple[str, Model], ...]:
    """What routing is held against, in the same row."""
    return (
        ("uniform mixture", (row, "mixture")),
        ("printed objective", (row, "printed_objective")),
        ("best expert, chosen on test", (row, BEST_EXPERT)),
    )


_ROUTING: Final = (
    ("its global model", (IOP, "global")),
    ("that with test-batch statistics", (IOP, "batch_statistics")),
    *_beside_routing(IOP),
)
_SHIPPED: Final = (
    ("FedAvg", ("fedavg", "deployed")),
    ("FedAvg, more augmentation", ("augmentation", "deployed")),
)
GRACE: Final = "grace:reset_optimizer=false"
FEDDAG: Final = {
    "ham10000_pretrained_out": "feddag:ema=0.9,reset_optimizer=false",
    "ham10000_features": "feddag:ndag=false,reset_optimizer=false",
    "ham10000_features_random": "feddag:ndag=false,ema=0.9,reset_optimizer=false",
    "ham10000_out": "feddag:ema=0.9,reset_optimizer=false",
    "brain_lgg_out": "feddag:ema=0.9,reset_optimizer=false",
}
CLAIMS: Final = (
    Claim("fundus_fedsm", "fedsm", "inside", _FEDSM),
    # The global model of FedSM is FedAvg's.
    Claim(
        "brain_lgg_3d", "fedsm", "inside", (("FedAvg", ("fedsm", "global")), ("single site", ALONE))
    ),
    Claim("brain_lgg", "fedsm", "inside", _FEDSM),
    *(Claim(study, IOP, "outside", _ROUTING) for study in ("fundus_iop_fl", "brain_lgg_iop_fl")),
    *(Claim(study, IOP, "inside", _ROUTING[:1]) for study in ("fundus_iop_fl", "brain_lgg_iop_fl")),
    *(
        Claim(study, "prr", "inside", _PRR)
        for study in ("ham10000_prr", "ham10000_prr_7", "ham10000_prr_features")
    ),
    *(Claim(study, GRACE, "outside", _OUTSIDE) for study in FEDDAG),
    *(Claim(study, GRACE, "inside", _INSIDE) for study in FEDDAG),
    *(
        Claim(study, GRACE, "outside", _OUTSIDE, "balanced_accuracy")
        for study in FEDDAG
        if study != "brain_lgg_out"
    ),
    *(
        Claim(study, "feddag", "outside", _SHIPPED)
        for study in ("ham10000_feddag", "mitosis_feddag")
    ),
    *(Claim(study, row, "outside", _OUTSIDE) for study, row in FEDDAG.items()),
)

GENERATION: Final = "feddag:alpha=1,ema=0,sha=false"
ROUTED: Final = "iop_fl:comparisons=true"
_ALL_FREQUENCIES: Final = ("all frequencies", ("prr:r0=0.5,r1=0.5", "deployed"))
_PLAIN_MEAN: Final = ("plain mean", ("prr:pfa=false", "deployed"))
_EQUAL_FEDBN: Final = ("FedBN, PRR's optimizer", _PRR[1][1])
_LABELS: Final = (_PRR[0], _EQUAL_FEDBN, _PLAIN_MEAN)
_THIRTY_ROUNDS: Final = (_PRR[0], ("FedBN", ("fedbn", "deployed")), _PLAIN_MEAN)
_ROUTED: Final = _beside_routing(ROUTED)
# On generated images in which one mechanism has to pay (`--suite mechanisms/NAME`).
MECHANISMS: Final = (
    Claim("mechanism_fedsm", "fedsm", "inside", _FEDSM),
    Claim("mechanism_prr", "prr", "inside", (*_LABELS, ("FedAvg", ("fedavg", "deployed")))),
    Claim("mechanism_prr_30", "prr", "inside", _THIRTY_ROUNDS),
    Claim("mechanism_prr_bands", "prr", "inside", (_ALL_FREQUENCIES,)),
    Claim("mechanism_prr_clean", "prr", "inside", _LABELS),
    Claim("mechanism_prr_contrary", "prr", "inside", _LABELS),
    transfer("mechanism_prr_transfer"),
    transfer("mechanism_prr_transfer_clean"),
    Claim(
        "mechanism_grace",
        "grace",
        "outside",
        (("FedAvg", ("fedavg", "deployed")), ("server alone", ("grace:client=erm", "deployed"))),
    ),
    Claim("mechanism_iop_fl", ROUTED, "outside", (*_ROUTED, ("ensemble", (ROUTED, "ensemble")))),
    Claim("mechanism_iop_fl_mixture", ROUTED, "outside", _ROUTED),
    Claim("mechanism_iop_fl_none", ROUTED, "outside", _ROUTED),
    Claim("mechanism_feddag", "feddag", "outside", _SHIPPED),
    Claim("mechanism_feddag", GENERATION, "outside", _SHIPPED),
    Claim("mechanism_feddag_beyond", "feddag", "outside", _SHIPPED),
    Claim("mechanism_feddag_beyond", GENERATION, "outside", _SHIPPED),
)


@dataclass(frozen=True)
class Line:
    """A claim against one comparator, as the page shows it."""

    study: str
    row: str
    metric: str
    role: str
    model: str
    comparator: str
    level: str
    difference: str
    over_seeds: str
    p: str
    detectable: str
    over_patients: str
    d: str
    verdict: str

    @property
    def effect(self) -> str:
        return f"{self.difference} {bracketed(self.over_seeds)}"

    @property
    def measure(self) -> str:
        of_model = "" if self.model == "deployed" else f", {self.model} models"
        return f"{self.metric} {self.role}{of_model}"


def bracketed(bounds: str) -> str:
    """An interval "low to high" as "[low, high]"."""
    return f"[{bounds.replace(' to ', ', ')}]"


def claim_lines(claim: Claim, study: StudyTables) -> list[Line]:
    """A line for every comparator."""
    study = copy(study)
    study.metric = claim.metric or task_of(study.groups)["metric"]
    compared = []
    for name, model in claim.comparators:
        difference = difference_of(study, model, (claim.row, claim.model), claim.role)
        assert difference is not None, f"{claim.study}: no difference of {claim.row} to {name}"
        compared.append((name, difference))
    adjusted = holm([difference.over_seeds.p for _, difference in compared])
    lines = []
    for (name, difference), p in zip(compared, adjusted, strict=True):
        role, gain, seeds, _, _, patients, _, _, of_claim, detectable, margin, verdict = (
            difference.cells(p, judged=True)
        )
        values = study.values.loc[(claim.row, claim.model, role, study.metric, ALL_SITES)]
        level = f"{values.mean():.3f}"
        about = (claim.study, claim.row, study.metric, role, claim.model, name, level)
        lines.append(Line(*about, gain, seeds, of_claim, detectable, patients, margin, verdict))
    return lines


@dataclass(frozen=True)
class Headline:
    """A claim of a paper with the study that says most about it."""

    claim: str
    setting: str
    study: str
    row: str
    role: str
    comparator: str
    why: str


_FUNDUS: Final = "fundus_vessels, ten seeds, Dice"
_BRAIN: Final = "brain_lgg, ten seeds, Dice"
_PRR_SETTING: Final = "ham10000, 3 classes, ten seeds, F1"
HEADLINES: Final = (
    Headline(
        "FedSM > FedAvg",
        _FUNDUS,
        "fundus_fedsm",
        "fedsm",
        "inside",
        "FedAvg",
        "personal models pay at the smallest site",
    ),
    Headline(
        "FedSM > FedAvg",
        "brain_lgg volumes, ten seeds, Dice",
        "brain_lgg_3d",
        "fedsm",
        "inside",
        "FedAvg",
        "personal models are 0.008 below the global one",
    ),
    Headline(
        "FedSM > training alone",
        _FUNDUS,
        "fundus_fedsm",
        "fedsm",
        "inside",
        "single site",
        "FedAvg is 0.020 below training alone",
    ),
    Headline(
        "IOP-FL > global model outside",
        _FUNDUS,
        "fundus_iop_fl",
        IOP,
        "outside",
        "its global model",
        "statistics of the test batch",
    ),
    Headline(
        "IOP-FL > uniform mixture",
        _FUNDUS,
        "fundus_iop_fl",
        IOP,
        "outside",
        "uniform mixture",
        "experts hardly differ",
    ),
    Headline(
        "IOP-FL > uniform mixture",
        _BRAIN,
        "brain_lgg_iop_fl",
        IOP,
        "outside",
        "uniform mixture",
        "experts hardly differ",
    ),
    Headline(
        "IOP-FL > global model inside",
        _BRAIN,
        "brain_lgg_iop_fl",
        IOP,
        "inside",
        "its global model",
        "unknown",
    ),
    Headline(
        "PRR > FedBN",
        _PRR_SETTING,
        "ham10000_prr",
        "prr",
        "inside",
        "FedBN",
        "FedBN is 0.145 below training alone",
    ),
    Headline(
        "PRR > training alone",
        _PRR_SETTING,
        "ham10000_prr",
        "prr",
        "inside",
        "alone with PRR's loss",
        "the shared deputy is 0.036 below it",
    ),
    Headline(
        "GRACE > FedAvg outside",
        "ham10000, MLP on ImageNet features, six seeds, AUC",
        "ham10000_features",
        GRACE,
        "outside",
        "FedAvg",
        "batch 16, one local epoch (code: 64, five)",
    ),
    Headline(
        "FedDAG > FedAvg outside",
        "ham10000, random weights, six seeds, AUC",
        "ham10000_feddag",
        "feddag",
        "outside",
        "FedAvg",
        "features of random weights hardly move",
    ),
)


def headlines_table(lines: list[Line]) -> str:
    """The first table of the page, from the lines of all claims."""
    columns = "claim|setting|level|effect (95 % over seeds)|detectable|d|verdict|why"
    table = [columns.split("|")]
    for headline in HEADLINES:
        (line, *_) = [line for line in lines if _shows(headline, line)]
        row = [headline.claim, headline.setting, line.level, line.effect, line.detectable]
        table.append([*row, line.d, line.verdict, headline.why])
    return _table(table)


def mechanisms_table(lines: list[Line]) -> str:
    """The claims on generated images."""
    columns = "study: level|comparator|difference (95 % over seeds)|p, Holm|detectable|verdict"
    table = [columns.split("|")]
    above = ""
    for line in lines:
        row = f", `{line.row}`" if line.row in (GENERATION, WITHOUT_CPA) else ""
        study = f"[{line.study}](results/{line.study}/study.zip){row}"
        claim = f"{study}, {line.measure}: {line.level}"
        first = "" if claim == above else claim
        table.append([first, line.comparator, line.effect, line.p, line.detectable, line.verdict])
        above = claim
    return _table(table)


def _shows(headline: Headline, line: Line) -> bool:
    return (line.study, line.row, line.role, line.comparator) == (
        headline.study,
        headline.row,
        headline.role,
        headline.comparator,
    )


def claims_tables(lines: list[Line]) -> list[str]:
    """For every method its row and its d, where all lines have one, and a table of its claims."""
    methods: dict[str, list[Line]] = {}
    for line in lines:
        methods.setdefault(line.row.partition(":")[0], []).append(line)
    return [_claims_of(of_method) for of_method in methods.values()]


def _claims_of(lines: list[Line]) -> str:
    """What is the same in all lines stands above the table; a claim's further comparators follow it."""
    rows = {line.row for line in lines}
    measures = {line.measure for line in lines}
    about = ["study"]
    about += ["row"] if len(rows) > 1 else []
    about += ["measure"] if len(measures) > 1 else []
    head = [f"{', '.join(about)}: level", "comparator", "difference (95 % over seeds)"]
    margins = {line.d for line in lines}
    d = ["d"] if len(margins) > 1 else []
    table = [[*head, "p, Holm", "detectable", "95 % over patients", *d, "verdict"]]
    above = ""
    for line in lines:
        about = [f"[{line.study}](results/{line.study}/study.zip)"]
        about += [f"`{line.row}`"] if len(rows) > 1 else []
        about += [line.measure] if len(measures) > 1 else []
        claim = f"{', '.join(about)}: {line.level}"
        first = "" if claim == above else claim
        numbers = [line.effect, line.p, line.detectable, bracketed(line.over_patients)]
        numbers += [line.d] if d else []
        table.append([first, line.comparator, *numbers, line.verdict])
        above = claim
    same = [f"Row `{lines[0].row}`"] if len(rows) == 1 else []
    same += [] if d else [f"d: {lines[0].d}"]
    above = f"{'; '.join(same)}.\n\n" if same else ""
    return f"{above}{_table(table)}"


def _table(table: list[list[str]]) -> str:
    head, *rows = (f"| {' | '.join(cells)} |\n" for cells in table)
    return f"{head}|{'---|' * len(table[0])}\n{''.join(rows)}"
