"""Two proposed tasks, compared by a short training on this device."""

import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any

from medflare.core.text import about
from medflare.data.datalist import site_folders, site_name
from medflare.data.progress import announce
from medflare.federation.local.loop import run_local
from medflare.preparation.planning import ProposedTask
from medflare.preparation.proposing import SMALL_CLASSIFIER, TaskHints, propose
from medflare.tasks.config import load_task

_SHARE = 1 / 3  # of the minutes of a round, for each training
_ROUNDS = 3  # the last ones of a training, whose mean counts; a training has as many at least
_MOST_ROUNDS = 25  # since validation takes time, too


def propose_by_trial(root: Path, hints: TaskHints) -> ProposedTask:
    """As `proposing.propose`; where it would train the head of a pretrained network alone, FedAvg
    trains this network and a small one for a third of `hints.minutes` each, and the one with the
    better validation images is proposed.

    Whether features of photographs tell the classes depends on the images: on dermoscopy they do
    better than a small network, on mitoses they do not.
    """
    frozen = propose(root, hints)
    seconds = _SHARE * 60 * hints.minutes
    if hints.network or hints.pretrained or not frozen.settings.get("freeze"):
        return frozen
    if seconds < _ROUNDS * frozen.seconds:
        return frozen
    small = propose(root, dataclasses.replace(hints, network=SMALL_CLASSIFIER))
    reached = []
    numbers = []
    for proposed in (frozen, small):
        name = proposed.settings["network"]["name"]
        announce(f"comparing networks on this device: {name} for {about(seconds)}")
        reached.append(validated(root, proposed, seconds))
        numbers.append(f"{name} {reached[-1]:.3f}")
    best = small if reached[1] > reached[0] else frozen
    metric = best.settings["metric"]
    reason = f"{metric} of validation images after {about(seconds)}: {', '.join(numbers)}"
    choices = []
    for choice in best.choices:
        if choice.setting == "network":
            choice = dataclasses.replace(choice, reason=reason)
        choices.append(choice)
    return dataclasses.replace(best, choices=tuple(choices))


def validated(root: Path, proposed: ProposedTask, seconds: float) -> float:
    """The task's metric on the validation images, median over the sites, of the last three rounds
    of FedAvg in so many seconds, or of 25 rounds; 0 if no site validates.
    """
    sites = [site_name(folder) for folder in site_folders(root)]
    rounds = min(_MOST_ROUNDS, int(seconds / proposed.seconds))
    results: Any = run_local(
        "fedavg", load_task(proposed.settings), sites, rounds=rounds, seed=0, data_root=root
    )
    candidates = results["model_selection"]["global"]["candidates"]
    values = [candidate["value"] for candidate in candidates[-_ROUNDS:]]
    return mean(values) if values else 0.0
