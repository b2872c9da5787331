"""Sentences of README and docs whose numbers come from the committed studies, with the numbers made again from the runs."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import pandas as pd

from medflare.evaluation.findings import is_rising
from medflare.evaluation.results import confusion
from medflare.studies.differences import Model
from medflare.studies.further_models import EXPERT_SPREAD
from medflare.studies.paper_effects import MARGIN
from medflare.studies.runs import curve_of, task_of
from medflare.studies.statistics import ALL_SITES, Results, compare, conclusion
from medflare.studies.suites import load_suite
from medflare.studies.tables import StudyTables
from studies.published_claims import (
    ALONE,
    CLAIMS,
    FEDAVG,
    GENERATION,
    GRACE,
    IOP,
    MECHANISMS,
    ROUTED,
    Claim,
    claim_lines,
    transfer,
)

ROOT: Final = Path(__file__).parents[2]
README: Final = "README.md"
RESULTS: Final = "docs/results.md"
PAGE_OF_FEDDAG: Final = "docs/methods/feddag.md"
PAGE_OF_PRR: Final = "docs/methods/prr.md"
PAGE_OF_IOP: Final = "docs/methods/iop_fl.md"
FEDSM: Final = ("fedsm", "deployed")
PLAIN_FEDAVG: Final = ("fedavg", "deployed")
PRR: Final = ("prr", "deployed")
PRR_ALONE: Final = ("single-site:method=prr", "deployed")
FEDBN: Final = ("prr:pfa=false,det=false,cpa=off", "deployed")
SEARCHED: Final = (0, 1, 2)  # seeds with which the images of mechanism_fedsm were chosen
AUGMENTED: Final = ("augmentation", "deployed")
SHIPPED: Final = ("feddag", "deployed")
Sentences = Iterator[tuple[str, str]]  # page and words in it


@dataclass(frozen=True)
class Runs:
    """A study at the sites of a role."""

    study: StudyTables
    role: str = "inside"

    def values(self, model: Model, site: str = ALL_SITES) -> "pd.Series[float]":
        """Of the task's metric, one per seed."""
        label, name = model
        values = self.study.values.loc[(label, name, self.role, self.study.metric, site)]
        assert isinstance(values, pd.Series)
        return values

    def level(self, model: Model, site: str = ALL_SITES) -> str:
        return f"{self.values(model, site).mean():.3f}"

    def gains(self, first: Model, second: Model, site: str = ALL_SITES) -> "pd.Series[float]":
        """Second - first, one per seed that both have."""
        return (self.values(second, site) - self.values(first, site)).dropna()

    def gain(self, first: Model, second: Model, site: str = ALL_SITES) -> str:
        return f"{self.gains(first, second, site).mean():+.3f}"

    def interval(self, first: Model, second: Model, without: Sequence[int] = ()) -> str:
        """Second - first with 95 %, without these seeds, where every seed draws its own images."""
        assert not self.study.split_ratio
        gains = self.gains(first, second).drop(list(without))
        low, high = compare(np.zeros(len(gains)), gains).interval or (np.nan, np.nan)
        return f"{gains.mean():+.3f} [{low:+.3f}, {high:+.3f}]"

    def below(self, first: Model, second: Model) -> str:
        """By how much the first is below the second."""
        return unsigned(self.gain(first, second))

    def selector(self, row: str = "fedsm") -> str:
        """Mean share of a site's images that the selector finds."""
        shares = []
        for run in self.study.groups[row]:
            table = confusion(run["sites"])
            shares.append(fmean(table[site][site] / sum(table[site].values()) for site in table))
        return f"{fmean(shares):.2f}"


def unsigned(text: str) -> str:
    return text.replace("+", "").removeprefix("-")


def sentences(study: Callable[[str], StudyTables]) -> Sentences:
    """Of all pages; `study`: name of a committed study -> its tables."""
    yield from of_the_readme(study)
    yield from of_fedsm(study)
    yield from of_iop_fl(study)
    yield from of_prr(study)
    yield from of_grace(study)
    yield from of_feddag(study)
    yield from of_the_mechanisms(study)
    yield from of_feddags_generator()


def of_feddags_generator() -> Sentences:
    """Of a benchmark: means over seeds, of small networks and of a pretrained one."""
    measured = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    [table] = [part for part in measured if "generator" in part["title"]]
    means = {}
    for name, *cells in table["rows"]:
        means[name] = [cell.split()[0] for cell in cells]
    printed = means["Eq. 1 and 3"]
    noise = means["noise"]
    steps = means["gradient steps on the images"]
    yield PAGE_OF_FEDDAG, f"hardly differs from x ({printed[2]})"
    yield PAGE_OF_FEDDAG, f"steps on the images reach {steps[2]}."
    yield (
        PAGE_OF_FEDDAG,
        (
            f"it is {printed[0]} (noise {noise[0]}, steps {steps[0]}), with α = 1 {printed[1]}. "
            f"The task term holds the generator back ({means['Eq. 1 alone'][0]} without)"
        ),
    )
    yield PAGE_OF_FEDDAG, f"as in the paper: {printed[3]}, less than noise ({noise[3]})."


def of_the_readme(study: Callable[[str], StudyTables]) -> Sentences:
    fundus = Runs(study("fundus_fedsm"))
    volumes = Runs(study("brain_lgg_3d"))
    over_fedavg, over_alone = claim_lines(CLAIMS[0], study("fundus_fedsm"))
    of_volumes, _ = claim_lines(CLAIMS[1], study("brain_lgg_3d"))
    yield (
        README,
        (
            f"FedSM on retinal vessels {fundus.level(FEDSM)}, FedAvg {fundus.level(PLAIN_FEDAVG)} "
            f"(difference 95 % {over_fedavg.over_seeds.replace('+', '')}, with both comparators "
            f"p {over_fedavg.p}: {over_fedavg.verdict}), training alone {fundus.level(ALONE)} "
            f"(not above it: {over_alone.over_seeds.replace('+', '')}); "
            f"on brain volumes {volumes.level(FEDSM)}, FedAvg {volumes.level(('fedsm', 'global'))} "
            f"({of_volumes.over_seeds.replace('+', '')})."
        ),
    )
    above = []
    for name in ("fundus_iop_fl", "brain_lgg_iop_fl"):
        runs = Runs(study(name), "outside")
        above.append(f"{runs.gains((IOP, 'global'), (IOP, 'deployed')).mean():.2f}")
    yield README, f"IOP-FL at outside sites {' and '.join(above)} above the global model"
    over_fedbn = []
    for claim in CLAIMS:
        if claim.row == "prr":
            over_fedbn += claim_lines(claim, study(claim.study))[1:]
    assert [line.verdict for line in over_fedbn].count("confirmed") == 1
    assert (over_fedbn[0].study, over_fedbn[0].verdict) == ("ham10000_prr", "confirmed")
    assert len(over_fedbn) == 3
    yield (
        README,
        (
            f"PRR is above FedBN in one of three studies (F1 {over_fedbn[0].difference}, where FedBN "
            f"is {Runs(study('ham10000_prr')).below(FEDBN, PRR_ALONE)} below training alone)"
        ),
    )


def of_fedsm(study: Callable[[str], StudyTables]) -> Sentences:
    fundus = Runs(study("fundus_fedsm"))
    centralised = ("centralised", "deployed")
    gains = fundus.gains(PLAIN_FEDAVG, FEDSM)
    share = gains.mean() / fundus.gains(PLAIN_FEDAVG, centralised).mean()
    assert round(5 * share) == 2 and list(gains[gains <= 0]) == [0.0]
    gammas = {run["seed"]: run["selector"]["gamma"] for run in fundus.study.groups["fedsm"]}
    assert gammas[gains.idxmin()] == 1, "the global model everywhere"
    yield (
        RESULTS,
        (
            f"two fifths of what centralised training gains ({fundus.gain(PLAIN_FEDAVG, centralised)}), "
            "in all seeds but one, in which γ chose the global model everywhere"
        ),
    )
    at_lesav = (fundus.level(PLAIN_FEDAVG, "LESAV"), fundus.level(FEDSM, "LESAV"))
    below = f"FedAvg is {fundus.below(PLAIN_FEDAVG, ALONE)} below training alone"
    yield (
        RESULTS,
        (
            f"LESAV, the smallest site ({' to '.join(at_lesav)}). "
            f"The selector's balanced accuracy is {fundus.selector()}."
        ),
    )
    yield RESULTS, f"| {below} |"

    over = []
    for name in ("fedsm_table3", "fedsm_table4"):
        numbers = load_suite(name).numbers
        of_rows = [numbers[row]["mean"] for row in ("FedSM", "FedAvg", "Centralized")]
        over.append([f"{of_rows[0] - other:.3f}" for other in of_rows[1:]])
    of_fedavg, of_centralised = (" and ".join(pair) for pair in zip(*over, strict=True))
    yield (
        RESULTS,
        f"FedSM is {of_fedavg} above FedAvg, {of_centralised} above centralised training.",
    )
    volumes = Runs(study("brain_lgg_3d"))
    of_personal = volumes.below(("fedsm", "personal"), ("fedsm", "global"))
    yield RESULTS, f"| personal models are {of_personal} below the global one |"
    yield (
        RESULTS,
        (
            f"of {volumes.gain(ALONE, FEDSM)} over training alone FedAvg gains "
            f"{unsigned(volumes.gain(ALONE, ('fedsm', 'global')))}. "
            f"The selector finds {volumes.selector()} of the sites"
        ),
    )
    selectors = Runs(study("brain_lgg_selector"))
    yield (
        RESULTS,
        (
            f"has a balanced accuracy of {selectors.selector('fedsm:selector=ridge')}, one trained for "
            f"60 updates {selectors.selector('fedsm:selector_updates=60')}"
        ),
    )
    slices = Runs(study("brain_lgg"))
    of_validation = [run["selector"]["mean_gain"] for run in slices.study.groups["fedsm"]]
    yield (
        RESULTS,
        (
            "over FedAvg centralised training has "
            f"{slices.gain(PLAIN_FEDAVG, centralised)}, personal models "
            f"{slices.gain(PLAIN_FEDAVG, ('fedsm', 'personal'))}. They were {min(of_validation):.3f} to {max(of_validation):.3f} better on "
            "validation images only"
        ),
    )


def outside_site(run: Results) -> str:
    """The left-out site of a run."""
    (name,) = [name for name, site in run["sites"].items() if site["role"] == "outside"]
    return str(name)


def of_iop_fl(study: Callable[[str], StudyTables]) -> Sentences:
    spread = []
    sizes = []
    moves = []
    starts = []
    printed_at_du = []
    better = []
    for name in ("fundus_iop_fl", "brain_lgg_iop_fl"):
        runs = Runs(study(name), "outside")
        spread.append(runs.level((IOP, EXPERT_SPREAD)))
        sizes.append(" x ".join(map(str, task_of(runs.study.groups)["size"])))
        of_best: list[float] = []
        for run in runs.study.groups[IOP]:
            name_of_site = outside_site(run)
            site = run["sites"][name_of_site]
            dice = {model: values["dice"] for model, values in site["metrics"].items()}
            moves.append(dice["deployed"] - dice["mixture"])
            starts.append(site["reports"]["deployed"]["start"])
            experts = [dice[model] for model in dice if model.startswith("personal/")]
            of_best.append(max(experts) - dice["mixture"])
            if name_of_site == "DU":
                printed_at_du.append(dice["printed_objective"])
        better.append((sum(gain > 0 for gain in of_best), len(of_best)))
    assert set(starts) == {"mixture"}
    yield RESULTS, f"routing starts from the mixture in all {len(starts)} runs"
    yield (
        RESULTS,
        (
            f"(spread {' and '.join(spread)}; the best one is above the mixture in "
            f"{' and '.join(f'{number} of {runs_of}' for number, runs_of in better)} runs). "
            f"The worst run ended {-min(moves):.3f} below its start."
        ),
    )
    yield RESULTS, f"Ten seeds; {sizes[0]} (fundus_vessels), {sizes[1]} (brain_lgg)."
    yield (
        RESULTS,
        (
            "The printed objective empties masks at DU "
            f"({min(printed_at_du):.2f} to {max(printed_at_du):.2f})"
        ),
    )


def of_prr(study: Callable[[str], StudyTables]) -> Sentences:
    over_alone = []
    for name in ("ham10000_prr", "ham10000_prr_7", "ham10000_prr_features"):
        over_alone.append(Runs(study(name)).gain(ALONE, PRR))
    dermoscopy = Runs(study("ham10000_prr"))
    groups = dermoscopy.study.groups
    assert all(is_rising(curve_of(groups[row], "deployed")) for row, _ in (FEDBN, PRR))
    sites = dermoscopy.study.sites_of["inside"]
    assert all(dermoscopy.gains(PRR_ALONE, FEDBN, site).mean() < 0 for site in sites)
    others = [dermoscopy.gains(FEDBN, PRR, site) for site in sites if site != "vienna_dias"]
    below = f"FedBN is {dermoscopy.below(FEDBN, PRR_ALONE)} below training alone"
    yield RESULTS, f"| {below} |"
    deputy = dermoscopy.below(("prr", "global"), PRR_ALONE)
    yield RESULTS, f"| the shared deputy is {deputy} below it |"
    yield (
        RESULTS,
        (
            f"Over plain training alone PRR has {', '.join(over_alone)}. "
            f"{below.replace('FedBN', 'FedBN (ten seeds)')} with PRR's loss, lower at every site; "
            f"without vienna_dias PRR's lead is {(sum(others) / len(others)).mean():+.3f}. FedBN's "
            "validation curve still rises, as PRR's does."
        ),
    )


def of_grace(study: Callable[[str], StudyTables]) -> Sentences:
    for claim in CLAIMS:
        if (claim.study, claim.metric) == ("ham10000_pretrained_out", "balanced_accuracy"):
            (line,) = claim_lines(claim, study(claim.study))
            yield (
                RESULTS,
                (
                    f"GRACE's {line.difference} in balanced accuracy on the pretrained network "
                    f"counts classes of {few(claim, study)}"
                ),
            )
    inside = Runs(study("ham10000_out"))
    yield RESULTS, f"training alone is {inside.below(FEDAVG, ALONE)} above FedAvg inside"
    one_outside = Runs(study("ham10000_pretrained"), "outside")
    grace = (GRACE, "deployed")
    server_alone = ("grace:client=erm,reset_optimizer=false", "deployed")
    yield (
        RESULTS,
        (
            f"GRACE is {one_outside.below(grace, FEDAVG)} below FedAvg (over patients only); its "
            f"two-step training costs {one_outside.below(grace, server_alone)} of it."
        ),
    )


def few(claim: Claim, study: Callable[[str], StudyTables]) -> str:
    """How many images a class has at a hospital that is left out, where these are fewest."""
    images: dict[tuple[str, str], list[int]] = {}
    runs = study(claim.study).groups[claim.row]
    labels = task_of({claim.row: runs})["labels"]
    for run in runs:
        site = outside_site(run)
        targets = run["scores"][site]["deployed"]["targets"]
        for number, label in enumerate(labels):
            images.setdefault((label, site), []).append(targets.count(number))
    fewest = [key for key, of_seeds in images.items() if min(of_seeds) == 1]
    assert sorted(fewest) == [("bkl", "vienna_dias"), ("mel", "vidir_molemax")]
    counts = sorted({count for key in fewest for count in images[key]})
    places = ", ".join(f"`{label}` at {site}" for label, site in sorted(fewest))
    return f"{counts[0]} or {counts[1]} images: {places}."


def of_feddag(study: Callable[[str], StudyTables]) -> Sentences:
    shipped = [Runs(study(name), "outside") for name in ("ham10000_feddag", "mitosis_feddag")]
    (below_fedavg,) = {runs.below(SHIPPED, PLAIN_FEDAVG) for runs in shipped}
    yield (
        PAGE_OF_FEDDAG,
        (
            f"its AUC outside is {below_fedavg} below FedAvg in both, and "
            f"{' and '.join(runs.below(AUGMENTED, SHIPPED) for runs in shipped)} above plain "
            "augmentation"
        ),
    )

    pretrained = Runs(study("ham10000_pretrained_out"), "outside")
    average = ("feddag:ndag=false,kappa=0,ema=0.9,reset_optimizer=false", "deployed")
    no_average = ("feddag:ndag=false,kappa=0,ema=0,reset_optimizer=false", "deployed")
    yield (
        RESULTS,
        (
            f"({pretrained.below(average, FEDAVG)} to {pretrained.below(no_average, FEDAVG)} "
            "without it, with history and generation off)"
        ),
    )
    slices = Runs(study("brain_lgg_out"), "outside")
    history = ("feddag:ndag=false,ema=0.9,reset_optimizer=false", "deployed")
    yield (
        RESULTS,
        (
            "on brain_lgg the history is "
            f"({slices.gain(FEDAVG, history)} to {slices.gain(FEDAVG, average)})"
        ),
    )
    uniform = ("fedavg:weighting=uniform", "deployed")
    weights = study("brain_lgg_weights")
    yield (
        RESULTS,
        (
            "FedAvg with uniform site weights is "
            f"{Runs(weights, 'outside').gain(PLAIN_FEDAVG, uniform)} outside and "
            f"{Runs(weights).gain(PLAIN_FEDAVG, uniform)} inside"
        ),
    )
    [units] = task_of(study("ham10000_features").groups)["network"]["hidden"]
    yield RESULTS, f"`features`: an MLP ({units} units) on ImageNet features"
    features = Runs(study("ham10000_features"), "outside").values(FEDAVG)
    random = Runs(study("ham10000_features_random"), "outside").values(FEDAVG)
    yield RESULTS, f"ImageNet features are worth {(features - random).mean():.2f} outside to FedAvg"


# What README.md says of generated images: study and comparator -> verdict.
ON_GENERATED_IMAGES: Final = {
    ("mechanism_fedsm", "FedAvg"): "confirmed",
    ("mechanism_grace", "FedAvg"): "confirmed",
    ("mechanism_prr", "alone with PRR's loss"): "confirmed",
    ("mechanism_prr_30", "FedBN"): "opposite",
    ("mechanism_iop_fl", "uniform mixture"): "confirmed",
    ("mechanism_iop_fl_mixture", "uniform mixture"): "opposite",
    ("mechanism_iop_fl_none", "uniform mixture"): "opposite",
    ("mechanism_feddag", "FedAvg"): "opposite",
}


def of_the_mechanisms(study: Callable[[str], StudyTables]) -> Sentences:
    verdicts = {}
    for claim in MECHANISMS:
        if claim.row != GENERATION:
            for line in claim_lines(claim, study(claim.study)):
                verdicts[line.study, line.comparator] = line.verdict
    assert ON_GENERATED_IMAGES.items() <= verdicts.items()
    conventions = Runs(study("mechanism_fedsm"))
    nearer = conventions.level(("fedsm:lam=0.9", "deployed"))
    yield (
        "docs/methods/fedsm.md",
        f"Dice is {conventions.level(FEDSM)} with λ = 0.7, {nearer} with 0.9:",
    )
    unseen = conventions.gains(ALONE, FEDSM).drop(list(SEARCHED))
    over_alone = compare(np.zeros(len(unseen)), unseen)
    verdict = conclusion(over_alone, None, over_alone.p, MARGIN)
    assert verdict == "study too small"
    yield (
        RESULTS,
        (
            f"Without them: {conventions.interval(PLAIN_FEDAVG, FEDSM, SEARCHED)} to FedAvg; "
            f"{conventions.interval(ALONE, FEDSM, SEARCHED)} to training alone, {verdict}."
        ),
    )
    by_site = {}
    for site, name in (("Y", "mechanism_iop_fl_mixture"), ("Z", "mechanism_iop_fl_none")):
        runs = Runs(study(name), "outside")
        by_site[site] = runs.below((ROUTED, "mixture"), (ROUTED, "deployed"))
    yield (
        PAGE_OF_IOP,
        (
            f"by {by_site['Y']} at Y, half like A and half like B, "
            f"by {by_site['Z']} at Z, a third disc"
        ),
    )
    with_cpa = []
    for name in ("mechanism_prr", "mechanism_prr_clean"):
        alone = ("single-site:method=prr", "personal")
        with_cpa.append(Runs(study(name)).gain(alone, ("prr", "personal")))
    yield RESULTS, f"with it they have {' and '.join(with_cpa)} to training alone"
    dermoscopy = "ham10000_prr_transfer"
    (line,) = claim_lines(transfer(dermoscopy), study(dermoscopy))
    yield RESULTS, f"On ham10000 they have {line.effect} without CPA"
    starts = set()
    shares = []
    for run in study("mechanism_iop_fl").groups[ROUTED]:
        report = run["sites"]["X"]["reports"]["deployed"]
        starts.add(report["start"])
        shares.append(fmean(of_layer[1] for of_layer in report["coefficients"].values()))
        assert run["seed"] > 35, "the rule for the start was chosen with seeds 0 to 35"
    assert starts == {"B"}
    yield (
        RESULTS,
        f"routing starts from B in all ten runs and ends with {min(shares):.2f} of it or more",
    )
    grace = ("grace", "deployed")
    grace_outside = Runs(study("mechanism_grace"), "outside")
    grace_inside = Runs(study("mechanism_grace"))
    over_more_epochs = grace_outside.interval(("equal-compute", "deployed"), grace)
    yield (
        RESULTS,
        (
            f"GRACE outside, to FedAvg with twice the epochs: {over_more_epochs}. Inside, its local "
            f"models have {grace_inside.interval(PLAIN_FEDAVG, grace)} to FedAvg, "
            f"{grace_inside.interval(('grace', 'global'), grace)} to its global model."
        ),
    )
    inside = [
        Runs(study(name)).interval(ALONE, (ROUTED, "deployed"))
        for name in ("mechanism_iop_fl", "mechanism_iop_fl_mixture")
    ]
    yield (
        RESULTS,
        (
            f"Inside, its local models have {inside[0]} to training alone, {inside[1]} in "
            "iop_fl_mixture."
        ),
    )
    below_alone = Runs(study("mechanism_iop_fl")).below((ROUTED, "deployed"), ALONE)
    yield PAGE_OF_IOP, f"Inside, local models are {below_alone} below training alone."
    oracles = []
    for name in ("mechanism_grace", "mechanism_feddag", "mechanism_feddag_beyond"):
        values = Runs(study(name), "outside").values(("participating", "deployed"))
        oracles.append(f"{values.mean():.2f} in {name}")
    clean_sites = Runs(study("mechanism_grace_clean"), "outside").values(("fedavg", "deployed"))
    yield (
        RESULTS,
        (
            f"FedAvg would have {', '.join(oracles)}; from the three clean sites of mechanism_grace "
            f"alone, {clean_sites.mean():.2f} "
            "([mechanism_grace_clean](results/mechanism_grace_clean/study.zip))."
        ),
    )
