"""The weight of IOP-FL's divergence from the start (`outside.ANCHOR`): where experts contradict each other, and agree.

python benchmarks/anchor.py --seeds 20 21 22

Prints, for each weight, the Dice of the deployed model at the outside site beside that of the uniform
mixture: means over the seeds, and the lowest.
"""

import argparse
from statistics import fmean

from medflare.federation.local.loop import run_local
from medflare.methods.iop_fl import outside

WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.3)
# Inside sites, and the outside one: like one of three experts, or like two that agree.
SETTINGS = (("contradict", ["A", "B", "C"], "X"), ("agree", ["A", "C"], "W"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    print("experts     weight  deployed  lowest  mixture")
    for name, inside, site in SETTINGS:
        for weight in WEIGHTS:
            outside.ANCHOR = weight
            deployed = []
            mixture = []
            for seed in options.seeds:
                results = run_local(
                    "iop_fl",
                    "mechanisms/two_disks",
                    inside,
                    outside=[site],
                    rounds=options.rounds,
                    seed=seed,
                    resplit=seed,
                    comparisons=True,
                )
                metrics = results["sites"][site]["metrics"]
                deployed.append(metrics["deployed"]["dice"] or 0.0)
                mixture.append(metrics["mixture"]["dice"] or 0.0)
            means = f"{fmean(deployed):8.3f}  {min(deployed):6.3f}  {fmean(mixture):7.3f}"
            print(f"{name:10}  {weight:6.2f}  {means}", flush=True)


if __name__ == "__main__":
    main()
