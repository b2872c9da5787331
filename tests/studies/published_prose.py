"""Sentences of README and docs whose numbers come from the committed studies, with the numbers made again from the runs."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import pandas as pd

from medflare.evaluation.results import confusion
from medflare.studies.statistics import ALL_SITES, compare, detectable_difference
from medflare.studies.tables import EXPERT_SPREAD, HARM, Model, Run, StudyTables, task_of
from studies.published_claims import (
    ALONE,
    CLAIMS,
    FEDAVG,
    GENERATION,
    GRACE,
    IOP,
    ROUTED,
    claim_lines,
)

ROOT: Final = Path(__file__).parents[2]
README: Final = "README.md"
RESULTS: Final = "docs/results.md"
PAGE_OF_FEDDAG: Final = "docs/methods/feddag.md"
PAGE_OF_PRR: Final = "docs/methods/prr.md"
PAGE_OF_IOP: Final = "docs/methods/iop_fl.md"
FEDSM: Final = ("fedsm", "deployed")
PLAIN_FEDAVG: Final = ("fedavg", "deployed")
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
    yield from of_the_rules(study)
    yield from of_fedsm(study)
    yield from of_iop_fl(study)
    yield from of_prr_and_grace(study)
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
    of_volumes, of_volumes_alone = claim_lines(CLAIMS[1], study("brain_lgg_3d"))
    yield (
        README,
        (
            f"FedSM on retinal vessels {fundus.level(FEDSM)}, FedAvg {fundus.level(PLAIN_FEDAVG)} "
            f"(difference 95 % {over_fedavg.over_seeds.replace('+', '')}, with both comparators "
            f"p {over_fedavg.p}: {over_fedavg.verdict}), training alone {fundus.level(ALONE)} "
            f"(not above it: {over_alone.over_seeds.replace('+', '')}); "
            f"on brain volumes {volumes.level(FEDSM)}, FedAvg {volumes.level(('fedsm', 'global'))} "
            f"({of_volumes.over_seeds.replace('+', '')}; to training alone, five seeds: "
            f"{of_volumes_alone.over_seeds.replace('+', '')})."
        ),
    )
    above = []
    for name in ("fundus_iop_fl", "brain_lgg_iop_fl"):
        runs = Runs(study(name), "outside")
        above.append(f"{runs.gains((IOP, 'global'), (IOP, 'deployed')).mean():.2f}")
    yield README, f"IOP-FL at outside sites {' and '.join(above)} above the global model"


def of_the_rules(study: Callable[[str], StudyTables]) -> Sentences:
    overlap = study("ham10000_prr").split_ratio
    plain = [detectable_difference(seeds) for seeds in (3, 10)]
    overlapping = [detectable_difference(seeds, overlap) for seeds in (3, 10)]
    yield (
        RESULTS,
        (
            f"at least {plain[0]:.2f} (three seeds) or {plain[1]:.1f} (ten) standard deviations of "
            f"the seeds' differences; with this factor, at {overlap:.2f} test images for a training "
            f"image, {overlapping[0]:.1f} or {overlapping[1]:.1f}."
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
    lost = [f"{-fundus.gains(PLAIN_FEDAVG, FEDSM, site)[2]:.3f}" for site in ("CHASEDB1", "HRF")]
    below = f"FedAvg is {fundus.below(PLAIN_FEDAVG, ALONE)} below training alone"
    yield RESULTS, f"LESAV, the smallest site ({' to '.join(at_lesav)})"
    yield (
        RESULTS,
        (
            f"In seed 2 CHASEDB1 and HRF lose {' and '.join(lost)}. {below}. "
            f"The selector's balanced accuracy is {fundus.selector()}."
        ),
    )
    yield RESULTS, f"| {below} |"

    volumes = Runs(study("brain_lgg_3d"))
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
    yield RESULTS, f"centralised training gains {slices.gain(PLAIN_FEDAVG, centralised)}"
    yield (
        RESULTS,
        (
            f"Personal models were {min(of_validation):.3f} to {max(of_validation):.3f} better on "
            "validation images only"
        ),
    )


def outside_site(run: Run) -> str:
    """The left-out site of a run."""
    (name,) = [name for name, site in run["sites"].items() if site["role"] == "outside"]
    return str(name)


def of_iop_fl(study: Callable[[str], StudyTables]) -> Sentences:
    spread = []
    without_overlap = dict.fromkeys(("deployed", "mixture", "global"), 0)
    patients = 0
    sizes = []
    moves = []
    starts = []
    printed_at_du = []
    for name in ("fundus_iop_fl", "brain_lgg_iop_fl"):
        runs = Runs(study(name), "outside")
        spread.append(runs.level((IOP, EXPERT_SPREAD)))
        sizes.append(" x ".join(map(str, task_of(runs.study.groups)["size"])))
        for run in runs.study.groups[IOP]:
            name_of_site = outside_site(run)
            site = run["sites"][name_of_site]
            dice = {model: values["dice"] for model, values in site["metrics"].items()}
            for model in without_overlap:
                of_patients = run["scores"][name_of_site][model]["values"]["dice"]
                without_overlap[model] += of_patients.count(0.0)
            patients += len(of_patients)
            moves.append(dice["deployed"] - dice["mixture"])
            starts.append(site["reports"]["deployed"]["start"])
            if name_of_site == "DU":
                printed_at_du.append(dice["printed_objective"])
    assert set(starts) == {"mixture"}
    harmed = [move for move in moves if move < -HARM]
    assert len(harmed) == 6
    yield RESULTS, f"routing starts from the mixture in all {len(starts)} runs"
    yield (
        RESULTS,
        (
            f"(spread {' and '.join(spread)}). Of "
            f"{patients} test patients {without_overlap['deployed']} have no overlap with the deployed "
            f"mask, {without_overlap['mixture']} with the mixture's, {without_overlap['global']} with "
            f"the global model's. The worst run ended {-min(moves):.3f} below its start, six more than "
            f"{HARM:.2f}."
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


def of_prr_and_grace(study: Callable[[str], StudyTables]) -> Sentences:
    over_alone = []
    for name in ("ham10000_prr", "ham10000_prr_7", "ham10000_prr_features"):
        over_alone.append(Runs(study(name)).gain(ALONE, ("prr", "deployed")))
    yield RESULTS, f"Over plain training alone PRR has {', '.join(over_alone)}:"

    for claim in CLAIMS:
        if (claim.study, claim.metric) == ("ham10000_pretrained_out", "balanced_accuracy"):
            (line,) = claim_lines(claim, study(claim.study))
            yield (
                RESULTS,
                f"GRACE's {line.difference} in balanced accuracy on the pretrained network",
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
            f"two-step training costs {one_outside.below(grace, server_alone)} of it, its server "
            f"weights {one_outside.below(server_alone, FEDAVG)}."
        ),
    )


def of_feddag(study: Callable[[str], StudyTables]) -> Sentences:
    shipped = [Runs(study(name), "outside") for name in ("ham10000_feddag", "mitosis_feddag")]
    hospitals = shipped[0]
    yield (
        PAGE_OF_FEDDAG,
        (
            f"{' and '.join(runs.level(SHIPPED) for runs in shipped)} for FedDAG, "
            f"{' and '.join(runs.level(PLAIN_FEDAVG) for runs in shipped)} for FedAvg, "
            f"{' and '.join(runs.level(AUGMENTED) for runs in shipped)} for plain augmentation."
        ),
    )
    (below_fedavg,) = {runs.below(SHIPPED, PLAIN_FEDAVG) for runs in shipped}
    intervals = []
    for claim in CLAIMS:
        if claim.row == "feddag":
            _, over_augmented = claim_lines(claim, study(claim.study))
            intervals.append(over_augmented.over_seeds.replace("+", ""))
    yield (
        PAGE_OF_FEDDAG,
        (
            f"FedDAG is {below_fedavg} below FedAvg in both, and "
            f"{' and '.join(runs.below(AUGMENTED, SHIPPED) for runs in shipped)} above plain "
            f"augmentation (95 % over seeds {' and '.join(intervals)})."
        ),
    )

    at = {
        site: hospitals.gain(PLAIN_FEDAVG, SHIPPED, site)
        for site in ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    }
    yield (
        RESULTS,
        (
            f"ham10000 has {at['rosendahl']} and {at['vidir_modern']} at two hospitals, "
            f"{at['vidir_molemax']} and {at['vienna_dias']} at the two with the fewest patients"
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
    features = Runs(study("ham10000_features"), "outside").values(FEDAVG)
    random = Runs(study("ham10000_features_random"), "outside").values(FEDAVG)
    yield RESULTS, f"ImageNet features are worth {(features - random).mean():.2f} outside to FedAvg"


def of_the_mechanisms(study: Callable[[str], StudyTables]) -> Sentences:
    conventions = Runs(study("mechanism_fedsm"))
    nearer = conventions.level(("fedsm:lam=0.9", "deployed"))
    yield (
        "docs/methods/fedsm.md",
        f"Dice is {conventions.level(FEDSM)} with λ = 0.7, {nearer} with 0.9:",
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
    of_personal = []
    for name in ("mechanism_prr", "mechanism_prr_clean"):
        runs = Runs(study(name))
        alone = runs.level(("single-site:method=prr", "personal"))
        of_personal.append(f"({runs.level(('prr', 'personal'))}, alone {alone})")
    yield (
        PAGE_OF_PRR,
        (
            "Personal models gain nothing, with wrong labels "
            f"{of_personal[0]} or right ones {of_personal[1]}."
        ),
    )
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
    bands = Runs(study("mechanism_prr_bands"))
    everything = bands.level(("prr:r0=0.5,r1=0.5", "deployed"))
    amplitudes = bands.level(("prr:components=amplitude", "deployed"))
    yield (
        RESULTS,
        (
            f"With all frequencies exchanged PRR has {everything}, with amplitudes alone "
            f"{amplitudes} (prr_bands, five seeds)."
        ),
    )
    shipped = bands.level(("prr", "deployed"))
    yield PAGE_OF_PRR, f"it has {everything} instead of {shipped} (five seeds, too few)."
    generation = Runs(study("mechanism_feddag"), "outside")
    gain = generation.values((GENERATION, "deployed")) - generation.values(("fedavg", "deployed"))
    low, high = compare(np.zeros(len(gain)), gain).interval or (np.nan, np.nan)
    yield (
        PAGE_OF_FEDDAG,
        f"is {gain.mean():.3f} above FedAvg on images within its reach (95 % {low:.3f} to {high:.3f})",
    )
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
