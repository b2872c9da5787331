"""The weight of IOP-FL's divergence from the start (`outside.ANCHOR`).

python benchmarks/anchor.py --seeds 20 21 22
python benchmarks/anchor.py --weights 0 0.05 --hyper route_lr=0.01,route_epochs=20
python benchmarks/anchor.py --seeds 0 1 2 --weights 0 0.05 --data ../shared/data/brain_lgg

On generated images whose experts contradict each other, and agree; or with --data on brain_lgg as in
docs/results/brain_lgg_iop_fl, each site left out in turn.

Prints, for each weight, the Dice of the deployed model at the outside site beside that of the uniform
mixture: means, the lowest, and the patients without any overlap.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from medflare.data.loading import DATA_ROOT_VARIABLE
from medflare.methods.iop_fl import outside
from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.3)
MODELS = ("deployed", "mixture")


def generated() -> Iterator[tuple[str, Setting, str]]:
    """Like one of three experts, or like two that agree."""
    task = load_task("mechanisms/two_disks")
    yield "contradict", Setting(task, ("A", "B", "C", "X"), rounds=6), "X"
    yield "agree", Setting(task, ("A", "C", "W"), rounds=6), "W"


def brain_lgg() -> Iterator[tuple[str, Setting, str]]:
    """Each site in turn."""
    task = replace(
        load_task("brain_lgg"),
        size=(32, 32),
        network={"name": "unet", "channels": [16, 32, 64], "norm": "batch"},
        augment=({"name": "RandFlip", "prob": 0.5, "spatial_axis": 1},),
    )
    sites = ("CS", "DU", "FG", "HT")
    for site in sites:
        yield site, Setting(task, sites, rounds=15), site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--weights", type=float, nargs="+", default=WEIGHTS)
    parser.add_argument("--hyper", default="", help="further settings of the row")
    parser.add_argument("--data")
    options = parser.parse_args()
    settings_of_row = ["comparisons=true", "reset_optimizer=true"]
    if options.hyper:
        settings_of_row.append(options.hyper)
    row = Candidate.parse("iop_fl:" + ",".join(settings_of_row))
    print("outside     weight  deployed  lowest  mixture  no overlap (deployed, mixture)")
    settings = generated()
    if options.data:
        os.environ[DATA_ROOT_VARIABLE] = options.data
        settings = brain_lgg()
    for name, setting, site in settings:
        for weight in options.weights:
            outside.ANCHOR = weight
            dice: dict[str, list[float]] = {model: [] for model in MODELS}
            missed = dict.fromkeys(MODELS, 0)
            for seed in options.seeds:
                results = row.run(Draw(setting, seed, (site,)))
                for model in MODELS:
                    metrics = results["sites"][site]["metrics"][model]
                    dice[model].append(metrics["dice"] or 0.0)
                    of_patients = results["scores"][site][model]["values"]["dice"]
                    missed[model] += of_patients.count(0.0)
            deployed, mixture = dice.values()
            means = f"{fmean(deployed):8.3f}  {min(deployed):6.3f}  {fmean(mixture):7.3f}"
            print(f"{name:10}  {weight:6.2f}  {means}  {missed}", flush=True)


if __name__ == "__main__":
    main()
