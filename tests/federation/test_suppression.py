"""Small-cell suppression: no message of any method holds a count that a site withholds, or numbers of a class that few patients show."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_tasks import stacked
from medflare.core.manifest import MetaSpec, PerClass, Phase, TensorSpec
from medflare.core.message import Message
from medflare.federation.exchange import Reply
from medflare.federation.local import loop
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.local.loop import run_local
from medflare.federation.participant import Participant
from medflare.federation.settings import ENROL
from medflare.federation.update_validation.suppression import Suppression, small_classes
from medflare.methods.base import Step
from medflare.methods.catalogue import SURVEYS, get_method, method_names
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.site import Site
from methods import squares

MINIMUM: Final = 5
# Training images of each class, and how many patients show it: "a" and "b" suppress_splits all counts, "c" has no rare class.
CLASSES: Final = ("dark", "medium", "bright")
IMAGES: Final = {"a": (53, 41, 37), "b": (43, 29, 47), "c": (10, 11, 12), "z": (5, 6, 7)}
PATIENTS: Final = {"a": (9, 8, 2), "b": (9, 1, 8), "c": (9, 8, 7), "z": (5, 6, 7)}
WITHHELD: Final = ("a", "b")
TASK: Final = load_task(
    {
        "name": "rare_shades",
        "kind": "classification",
        "target": "multiclass",
        "labels": list(CLASSES),
        "channels": 1,
        "size": [16, 16],
        "network": {"name": "small_cnn", "channels": [4, 8], "batch_norm": True},
        "loss": {"name": "ce"},
        "optimizer": {"name": "adam", "lr": 0.01},
        "batch_size": 64,
        "local_epochs": 1,
        "metric": "accuracy",
    }
)
RUNS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **{name: (name, {}) for name in (*method_names(), *SURVEYS)},
    "fedsm_extra": ("fedsm_extra", {"selector_rounds": 1}),
    "prr, personal model outside": ("prr", {"outside_model": "personal"}),
    "grace, probed": ("grace", {"probe": True}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey pictures, the brighter the higher the class."""
    root = tmp_path_factory.mktemp("shades")
    random = np.random.default_rng(0)
    for site, counts in IMAGES.items():
        listed: dict[str, list[dict[str, Any]]] = {"training": [], "validation": [], "test": []}
        folder = root / site
        (folder / "images").mkdir(parents=True)
        rows = [("training", c, n % PATIENTS[site][c]) for c, count in enumerate(counts) for n in range(count)]
        rows += [(split, c, 100 + n) for split in ("validation", "test") for c in range(3) for n in range(6)]
        for number, (split, label, patient) in enumerate(rows):
            pixels = random.integers(0, 60, (16, 16)) + 80 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{number}.png")
            listed[split].append({"image": f"images/{number}.png", "label": label, "patient": f"{split}-{label}-{patient}"})
        (folder / "datalist.json").write_text(json.dumps(listed))
    return root


def numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """Every number among meta with its place, those in texts too."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers(inner, f"{place}/{name}")
    elif isinstance(value, list | tuple):
        for row, inner in enumerate(value):
            yield from numbers(inner, f"{place}[{row}]")
    elif isinstance(value, str):
        yield from ((f"{place}: {value}", float(found)) for found in re.findall(r"(?<![\w.+])\d+(?:\.\d+)?(?![\w.])", value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, float(value)


def betrayals(message: Message, counts: tuple[int, ...]) -> list[str]:
    """Where a message holds one of these counts, or its share of them all."""
    secrets = [float(number) for count in counts for number in (count, count / sum(counts))]
    found = [place for place, value in numbers(message.meta, "meta") if any(abs(value - secret) < 1e-9 for secret in secrets)]
    for entry, state in message.states.items():
        for name, tensor in state.items():
            values = tensor.double()
            if any(bool((values == _as(tensor.dtype, secret)).any()) for secret in secrets):
                found.append(f"{entry}/{name}")
    return found


def _as(dtype: torch.dtype, secret: float) -> float:
    """The number as a tensor of this type holds it; a share is no whole number."""
    return secret if not dtype.is_floating_point else float(torch.tensor(secret, dtype=dtype).double())


@pytest.mark.parametrize("name", RUNS)
def test_no_message_of_any_method_holds_a_withheld_count(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a site sends nor what the server passes on."""
    method, hyper = RUNS[name]
    call, make = LocalExchange.__call__, Participant
    seen: list[tuple[str, str]] = []

    def noted(exchange: LocalExchange, step: Step, outgoing: dict[str, Message]) -> dict[str, Reply]:
        replies = call(exchange, step, outgoing)
        for site, message in outgoing.items():
            seen.extend((f"{step.phase} to {site}", place) for of in WITHHELD for place in betrayals(message, IMAGES[of]))
        for site, reply in replies.items():
            assert reply.message is not None, reply.problem
            told = betrayals(reply.message, IMAGES[site])
            seen.extend((f"{step.phase} of {site}", place) for place in told if site in WITHHELD)
            assert step.phase != ENROL or bool(told) != (site in WITHHELD), (
                "a site without a rare class tells its counts: they would be found"
            )
        return replies

    monkeypatch.setattr(loop, "Participant", lambda *args, **more: make(*args, **more, minimum_patients=MINIMUM))
    monkeypatch.setattr(LocalExchange, "__call__", noted)
    results = run_local(method, TASK, ["a", "b", "c"], rounds=2 * get_method(method).trains, seed=1, outside=["z"], data_root=data, **hyper)
    assert results["status"] == "COMPLETED", results["reason"]
    assert seen == []


# ---- prototypes of PRR -----------------------------------------------------------------------------------------------------------


def rare_square(task: TaskConfig) -> Site:
    """A site of which two of twelve training patients show the last class."""
    site = squares.site("A", task)
    split = stacked(site.data.train)
    targets = split.targets.clone()
    if task.target == "multilabel":
        targets[:10, 1] = 0
    else:
        last = len(task.classes) - 1
        targets[:10] = torch.where(targets[:10] == last, last - 1, targets[:10])
        if task.kind == "classification":
            targets[10:] = last
    site.data = replace(site.data, train=replace(split, targets=targets))
    return site


KINDS: Final = {
    "binary classification": (squares.BINARY_CLASSIFICATION, "bright", 1),
    "multiclass classification": (squares.CLASSIFICATION, "bright", 2),
    "binary segmentation": (squares.SEGMENTATION, "square", 1),
    "multiclass segmentation": (squares.MULTICLASS, "corner", 2),
    "multilabel segmentation": (squares.MULTILABEL, "corner", 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prototype_of_few_patients_stays_at_the_site(kind: str) -> None:
    task, rare, row = KINDS[kind]
    site, method = rare_square(task), get_method("prr")
    assert small_classes(site, "train", 3) == {rare} and not small_classes(site, "train", 2)
    participants = [Participant("A", lambda role: site, method, {}, minimum_patients=minimum) for minimum in (0, 3)]
    server = squares.server(method.server_class, task, algorithms={"A": squares.algorithm(method.site_class, "A", task)}, outside=())
    told = [_trained(participant, server) for participant in participants]
    whole, guarded = (reply.states["prototypes"] for reply in told)
    assert whole["present"].all() and whole["prototypes"][row].any()
    assert not guarded["present"][row] and not guarded["prototypes"][row].any()
    others = [other for other in range(len(whole["present"])) if other != row]
    assert guarded["present"][others].all() and guarded["prototypes"][others].equal(whole["prototypes"][others])
    assert all(told[0].states["model"][name].equal(tensor) for name, tensor in told[1].states["model"].items())
    own = participants[1]._algorithm.recall(1).memory.states["prototypes"]["prototypes"]
    assert own.equal(whole["prototypes"]), "the site itself goes on with all of them"


def _trained(participant: Participant, server: Any) -> Message:
    participant.answer(ENROL, 0, Message({}, {"role": "inside", "sites": ["A", "B", "C"]}))
    outgoing = server.configure(Step("train", 0), "A")
    return participant.answer("train", 0, Message(outgoing.states, {**outgoing.meta, "step": 0, "run_rounds": 1}))


def test_gamma_of_a_rare_class_stays_too() -> None:
    algorithm = squares.algorithm(get_method("prr").site_class, "A", squares.CLASSIFICATION)
    meta = {"gamma": {"dark": 1.0, "medium": 1.5, "bright": 2.0}, "gammas": {name: [1.0, 2.0] for name in CLASSES}}
    site = rare_square(squares.CLASSIFICATION)
    told = Suppression(site, 3).suppressed(Message({}, {**meta, "n_samples": 12}), algorithm.phase("train")).meta
    assert told == {"gamma": {"dark": 1.0, "medium": 1.5}, "gammas": {"dark": [1.0, 2.0], "medium": [1.0, 2.0]}, "n_samples": 12}
    assert Suppression(site, 2).suppressed(Message({}, dict(meta)), algorithm.phase("train")).meta == meta


def test_a_site_of_few_patients_has_no_part_in_the_ridge_selector() -> None:
    """Statistics of its images are zeros, which the server takes for none."""
    method = get_method("fedsm")
    log, server, algorithms = squares.federation(method.site_class, method.server_class, rounds=1, selector="ridge", gamma=0.5)
    step, _, replies = next(turn for turn in log if turn.step.phase == "selector_features")
    phase = method.site_class.phase("selector_features")

    def solved(replies: dict[str, Message]) -> dict[str, torch.Tensor]:
        server.aggregate(step, replies)
        return dict(server.selector.state)

    without = solved({name: replies[name] for name in ("A", "C")})
    guarded = {**replies, "B": Suppression(algorithms["B"].site, 13).suppressed(replies["B"], phase)}
    assert not any(tensor.any() for tensor in guarded["B"].states["selector_statistics"].values())
    assert squares.equal(solved(guarded), without) and not squares.equal(solved(replies), without)
    nobody = {name: Suppression(algorithms[name].site, 13).suppressed(reply, phase) for name, reply in replies.items()}
    assert squares.equal(solved(nobody), solved(replies)), "the selector stays as it was"


# ---- methods of other distributions ----------------------------------------------------------------------------------------------


def suppressed(per_class: PerClass, states: dict[str, Any], meta: dict[str, Any], measured: str = "", minimum: int = 3) -> Message:
    entry = TensorSpec("cells", "for a test", per_class=per_class, measured=measured)
    phase = Phase("train", reply=(entry, TensorSpec("model")), reply_meta=(MetaSpec("table", per_class=per_class, measured=measured),))
    return Suppression(rare_square(squares.CLASSIFICATION), minimum).suppressed(Message(states, meta), phase)


def test_values_of_a_class_go_and_counts_of_all_classes_go() -> None:
    """Counts add up to the site's images: the one that is missing would follow from the others."""
    cells = {"mean": torch.ones(3, 2), "count": torch.tensor([6, 4, 2]), "total": torch.tensor(12.0), "pair": torch.ones(2, 3)}
    model = {"w": torch.ones(3)}
    values = suppressed(
        "values", {"cells": cells, "model": model}, {"table": {"dark": 1.0, "bright": 2.0, "more": {"medium": 3.0, "sum": 9}}}
    )
    assert values.states["cells"]["mean"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert not values.states["cells"]["count"].any() and values.states["cells"]["count"].dtype == torch.int64
    assert not values.states["cells"]["total"].any() and not values.states["cells"]["pair"].any(), (
        "which of it is of the class is not known"
    )
    assert values.meta["table"] == {"dark": 1.0, "more": {"medium": 3.0, "sum": None}}
    counts = suppressed("counts", {"cells": {"share": torch.ones(3)}, "model": model}, {"table": [0.5, 0.3, 0.2]})
    assert not counts.states["cells"]["share"].any() and counts.meta["table"] == []
    assert suppressed("values", {}, {"table": [[1.0], [2.0], [3.0]]}).meta["table"] == [[1.0], [2.0], []]
    for kept in (values, counts):
        assert kept.states["model"] is model
    assert cells["mean"].all() and cells["count"].tolist() == [6, 4, 2], "what the method itself holds is left as it is"


def test_a_declared_entry_of_enough_patients_leaves_as_it_is() -> None:
    cells = {"mean": torch.ones(3, 2), "count": torch.tensor([6, 4, 2])}
    left = suppressed("counts", {"cells": cells}, {"table": [6, 4, 2]}, minimum=2)
    assert left.states["cells"] is cells and left.meta["table"] == [6, 4, 2]


def test_an_entry_that_was_measured_on_few_patients_is_zero() -> None:
    cells = {"mean": torch.ones(3, 2)}
    assert suppressed("", {"cells": cells}, {}, measured="validation", minimum=4).states["cells"] is cells
    assert not suppressed("", {"cells": cells}, {}, measured="validation", minimum=5).states["cells"]["mean"].any()
