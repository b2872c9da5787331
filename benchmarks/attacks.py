"""What one lying site of three does to the honest ones: attacks on FedAvg, robust means and each paper's method.

    python benchmarks/attacks.py [--rounds 8] [--seeds 1] [--outlier-policy used] [--selection median] [--out attacks.json] [--colluding]

Every run is one of the plain loop on the phantom at 32 pixels, with 24 training images a site. A cell is the mean test Dice of the two
honest sites' deployed models, over the seeds, and what the events say of the liar: R rejected, S suspicious, W warned of, - nothing.
With --colluding two sites of four lie, each the same lie; small letters are what the events say of honest sites.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import medflare
from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.core.states import StateDict, difference, moved
from medflare.data.loading import SiteData, Split
from medflare.federation.exchange import SiteReply
from medflare.federation.local import loop
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.settings import ENROL
from medflare.methods.base import Step
from medflare.tasks.config import load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

SITES = ("site-1", "site-2", "site-3")
LIARS = ("site-2",)
FOUR = (*SITES, "site-4")
COLLUDING = ("site-2", "site-4")
MANY = 10**9
ALONE = "without the site"
COUNTS = (24, 6, 8)  # training, validation and test images of a site
_NETWORK = {"name": "unet", "channels": [8, 16], "norm": "instance"}
TASK = load_task({**load_task("phantom").to_dict(), "size": [32, 32], "network": _NETWORK})
# What differs from the defaults.
METHODS: dict[str, dict[str, Any]] = {"feddag": {"warmup": 0}, "robust": {"rule": "median"}}
LETTERS = {"rejected": "R", "suspicious": "S", "warning": "W"}
# (step, sent, honest reply, memory of the liar) -> reply.
Lie = Callable[[Step, Message, Message, dict[str, StateDict]], Message]


def scaled(factor: float) -> Lie:
    """Every update times a factor."""

    def lie(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
        changed = {
            entry: moved(
                sent.states[entry], difference(reply.states[entry], sent.states[entry]), factor
            )
            for entry in both(sent, reply)
        }
        return Message({**reply.states, **changed}, reply.meta)

    return lie


def noise(factor: float) -> Lie:
    """The honest update and Gaussian noise so many times as long, in every entry that is a new version of what was sent."""

    def lie(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
        states = dict(reply.states)
        for entry in both(sent, reply):
            update = difference(reply.states[entry], sent.states[entry])
            drawn = torch_generator(0, step.round, "noise", entry)
            names = [
                name
                for name, tensor in update.items()
                if tensor.is_floating_point() and not name.endswith("running_var")
            ]
            random = {
                name: torch.randn(update[name].shape, generator=drawn, dtype=update[name].dtype)
                for name in names
            }
            wanted = factor * length(update) / max(length(random), 1e-12)
            states[entry] = {
                **reply.states[entry],
                **{name: reply.states[entry][name] + wanted * random[name] for name in names},
            }
        return Message(states, reply.meta)

    return lie


def drift(
    factor: float, chosen: Callable[[StateDict], list[str]] | None = None, ones: bool = False
) -> Lie:
    """What was sent, moved in one direction by so many times the length of the site's own update, in every round.

    Args:
        factor: of the length of the honest update.
        chosen: an update -> the tensors that move; None: all but running variances.
        ones: the direction is (1, ..., 1); else it is drawn once.
    """

    def lie(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
        states = dict(reply.states)
        for entry in both(sent, reply):
            update = difference(reply.states[entry], sent.states[entry])
            floating = {
                name: tensor for name, tensor in update.items() if tensor.is_floating_point()
            }
            names = (
                [name for name in floating if not name.endswith("running_var")]
                if chosen is None
                else chosen(floating)
            )
            drawn = torch_generator(0, "drift", entry)  # the same in every round
            direction: StateDict = {}
            for name in names:
                direction[name] = (
                    torch.ones_like(update[name])
                    if ones
                    else torch.randn(update[name].shape, generator=drawn)
                )
            wanted = factor * length(update) / max(length(direction), 1e-12)
            moving = {name: sent.states[entry][name] + wanted * direction[name] for name in names}
            states[entry] = {
                **reply.states[entry],
                **{name: sent.states[entry][name] for name in floating},
                **moving,
            }
        return Message(states, reply.meta)

    return lie


def last_bias(update: StateDict) -> list[str]:
    """The bias of the last layer; its weight if it has none."""
    layer = list(update)[-1].rpartition(".")[0]
    return [name for name in update if name == f"{layer}.bias"] or list(update)[-1:]


def middle_convolution(update: StateDict) -> list[str]:
    """The convolution in the middle of the network."""
    names = [name for name, tensor in update.items() if tensor.ndim > 2] or list(update)
    return names[len(names) // 2 : len(names) // 2 + 1]


def length(state: Mapping[str, torch.Tensor]) -> float:
    """Euclidean, of all floating-point numbers together."""
    return math.sqrt(
        sum(
            float(tensor.double().square().sum())
            for tensor in state.values()
            if tensor.is_floating_point()
        )
    )


def steps(factor: float, honest: str = "") -> Lie:
    """Models as they are; gradients and changes that travel by themselves (SCAFFOLD's controls, FedSM's selector) times a factor.

    Args:
        factor: of every tensor.
        honest: the beginning of the names of tensors that stay; "" for none.
    """

    def lie(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
        further = {
            entry: state for entry, state in reply.states.items() if entry not in both(sent, reply)
        }
        scaled = {
            entry: {
                name: tensor if honest and name.startswith(honest) else factor * tensor
                for name, tensor in state.items()
            }
            for entry, state in further.items()
        }
        return Message({**reply.states, **scaled}, reply.meta)

    return lie


def replayed(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
    """The entries of its first update, again and again."""
    for entry in both(sent, reply):
        memory.setdefault(entry, reply.states[entry])
    return Message(
        {**reply.states, **{entry: memory[entry] for entry in both(sent, reply)}}, reply.meta
    )


def praised(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
    """Validation metrics of 1 for what one round of training gave, of 0 for everything after it."""
    meta = dict(reply.meta)
    if "validation" in meta:
        meta["validation"] = dict.fromkeys(meta["validation"], float(step.round == 1))
    return Message(reply.states, meta)


def inflated(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
    """A thousand million training images, from enrolment on."""
    meta = dict(reply.meta)
    if step.phase == ENROL:
        counts = [count * MANY // meta["n"]["train"] for count in meta["class_counts"]]
        # Every image has as many pixels.
        whole = sum(meta["class_counts"]) // meta["n"]["train"] * MANY
        meta |= {
            "n": {**meta["n"], "train": MANY},
            "class_counts": [counts[0] + whole - sum(counts), *counts[1:]],
        }
    elif "n_samples" in meta:
        meta["n_samples"] = MANY
    return Message(reply.states, meta)


def honest(step: Step, sent: Message, reply: Message, memory: dict[str, StateDict]) -> Message:
    """Nothing is changed."""
    return reply


ATTACKS: dict[str, Lie] = {
    "honest": honest,
    "sign flip": scaled(-1.0),
    "sign flip x 10": scaled(-10.0),
    "huge (x 1000)": scaled(1000.0),
    "labels flipped": honest,  # the site's own masks are
    "replay of round 0": replayed,
    "zeros (free rider)": scaled(0.0),
    "false metrics": praised,
    "false count": inflated,
    "noise x 9": noise(9.0),
    "noise x 90": noise(90.0),
    "drift x 4": drift(4.0),
    "drift x 9": drift(9.0),
    "head bias x 9": drift(9.0, last_bias, ones=True),
    "one tensor x 9": drift(9.0, middle_convolution),
    "steps flipped": steps(-1.0),
    "steps x 50": steps(50.0),
    "steps flipped x 50": steps(-50.0),
    "steps flipped x 50 but the last layer's": steps(-50.0, honest="head."),
}


def both(sent: Message, reply: Message) -> list[str]:
    """Entries of a reply that are a new version of what was sent."""
    return [
        entry
        for entry, state in reply.states.items()
        if state.keys() <= sent.states.get(entry, {}).keys()
    ]


class Lying(LocalExchange):
    """The plain loop with sites that lie."""

    lie: Lie = staticmethod(honest)
    liars: tuple[str, ...] = LIARS
    memory: dict[str, dict[str, StateDict]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory = {site: {} for site in self.liars}

    def reply(self, site: str, step: Step, message: Message) -> SiteReply:
        sent = Message(
            {
                entry: {name: tensor.clone() for name, tensor in state.items()}
                for entry, state in message.states.items()
            }
        )
        reply = super().reply(site, step, message)
        if site not in self.liars or reply.message is None:
            return reply
        return SiteReply(type(self).lie(step, sent, reply.message, self.memory[site]))


@cache
def images(name: str) -> SiteData:
    """The first images of a site of the phantom."""
    data = open_site(name, TASK, seed=0, role="inside", data_root=None).data
    train, validation, test = (
        first(split, count)
        for split, count in zip((data.train, data.validation, data.test), COUNTS, strict=True)
    )
    return SiteData(train, validation, test)


def first(split: Any, count: int) -> Split:
    """Some images of a split."""
    return Split(
        split.images[:count], split.targets[:count], split.patients[:count], split.names[:count]
    )


def inverted(split: Any) -> Split:
    """A split whose masks are what was outside them."""
    return Split(split.images, 1 - split.targets, split.patients, split.names)


def opener(seed: int, flipped: tuple[str, ...]) -> Callable[[str, str], Site]:
    """The sites; training and validation masks of some inverted."""

    def opened(name: str, role: str) -> Site:
        data = images(name)
        if name in flipped:
            train, validation = (inverted(split) for split in (data.train, data.validation))
            data = SiteData(train, validation, data.test)
        return Site(name, TASK, data, seed)

    return opened


def run(
    method: str,
    attack: str,
    seed: int,
    rounds: int,
    sites: tuple[str, ...] = SITES,
    liars: tuple[str, ...] = LIARS,
    **rules: str,
) -> tuple[float, str]:
    """(mean Dice of the honest sites, letters of the events that name a liar, small ones of those that name an honest site)."""
    Lying.lie, Lying.liars = staticmethod(ATTACKS[attack]), liars
    before, loop.LocalExchange = LocalExchange, Lying  # type: ignore[assignment, misc]
    try:
        options: dict[str, Any] = {**rules, **METHODS.get(method, {})}
        opened = opener(seed, liars if attack == "labels flipped" else ())
        results = medflare.run_local(
            method, TASK, sites, rounds=rounds, seed=seed, opener=opened, **options
        )
    finally:
        loop.LocalExchange = before  # type: ignore[misc]
    if results["status"] != "COMPLETED":
        return float("nan"), results["reason"]
    dice = mean(
        results["sites"][site]["metrics"]["deployed"]["dice"] for site in sites if site not in liars
    )
    kinds = {
        (event["kind"], event["site"] in liars) for event in results["events"] if event["site"]
    }
    named = "".join(letter for kind, letter in LETTERS.items() if (kind, True) in kinds)
    blamed = "".join(letter.lower() for kind, letter in LETTERS.items() if (kind, False) in kinds)
    return dice, named + blamed or "-"


def table(found: Mapping[str, Mapping[str, list[tuple[float, str]]]], who: str) -> str:
    """Markdown: a row an attack, a column a method."""
    columns = list(found)
    lines = [f"| {who} | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for row in next(iter(found.values())):
        cells = []
        for column in columns:
            runs = found[column][row]
            letters = (
                "".join(
                    letter for letter in "RSWrsw" if any(letter in events for _, events in runs)
                )
                or "-"
            )
            cells.append(f"{mean(dice for dice, _ in runs):.2f} {letters}")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default="fedavg,robust,fedsm,prr,grace,iop_fl,feddag")
    parser.add_argument(
        "--attacks",
        default=",".join((ALONE, *(name for name in ATTACKS if not name.startswith("steps")))),
    )
    parser.add_argument("--outlier-policy", choices=("used", "rejected"), default="used")
    parser.add_argument(
        "--selection", choices=("median", "paired", "mean", "last"), default="median"
    )
    parser.add_argument("--colluding", action="store_true", help="two sites of four lie")
    parser.add_argument(
        "--out",
        type=Path,
        help="file that is written after every run, and gone on from where it is there",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    everybody, liars = (FOUR, COLLUDING) if options.colluding else (SITES, LIARS)
    rules = {"outlier_policy": options.outlier_policy, "selection": options.selection}
    stored = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for seed in range(options.seeds):  # outermost: a run that is cut short has a whole table
        for method in options.methods.split(","):
            for attack in options.attacks.split(","):
                key = f"{method}/{attack}/{seed}/{options.rounds}/{options.outlier_policy}/{options.selection}/{len(liars)}"
                if key not in stored:
                    alone = attack == ALONE
                    sites = (
                        tuple(site for site in everybody if site not in liars)
                        if alone
                        else everybody
                    )
                    stored[key] = run(
                        method,
                        "honest" if alone else attack,
                        seed,
                        options.rounds,
                        sites,
                        liars,
                        **rules,
                    )
                    print(key, *stored[key], flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(stored))
                found.setdefault(method, {}).setdefault(attack, []).append(tuple(stored[key]))
    print(table(found, f"{len(liars)} of {len(everybody)} sites send"))


if __name__ == "__main__":
    main()
