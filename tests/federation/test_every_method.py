"""One run of every method: no message holds a suppressed count, no reply a small number, and a site computes the schedule."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_tasks import small_task
from medflare.core.message import Message
from medflare.data.local import LocalSettings
from medflare.federation.data_record import DataRecord
from medflare.federation.exchange import SiteReply
from medflare.federation.local import loop
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.local.loop import run_local
from medflare.federation.participant import Participant
from medflare.federation.request_order import schedule_of
from medflare.federation.settings import ENROL, FINALIZE
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method, method_names

SITES: Final = ("a", "b", "c")
SUPPRESSED: Final = ("a", "b")  # all their counts; c has no rare class
MINIMUM: Final = 5
# Training images and patients of each class (dark, medium, bright), and of one that the task does not have.
IMAGES: Final = {"a": (53, 41, 37, 2), "b": (43, 29, 47, 2), "c": (10, 11, 12, 2), "z": (5, 6, 7)}
PATIENTS: Final = {"a": (9, 8, 2, 2), "b": (9, 1, 8, 2), "c": (9, 8, 7, 2), "z": (5, 6, 7)}
# The other splits have an image of each patient. "a" has few validation patients, and three dark and
# three medium test images look alike: few patients in cells of the confusion matrix.
VALIDATION: Final = {"a": (2, 1, 0)}
TEST: Final = {"a": (8, 9, 8)}
USUAL: Final = (6, 6, 6)
TASK: Final = small_task(
    "classification",
    network={"name": "small_cnn", "channels": [4, 8], "batch_norm": True},
    batch_size=64,
    label_values={"dark": [0], "medium": [1], "bright": [2]},
    unlisted_labels="drop",
)
WARM: Final[dict[str, Any]] = {"warmup": 1}  # its generator trains in the second round
RUNS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # ConDist needs two structures.
    **{name: (name, {}) for name in (*method_names(), "fingerprint") if name != "condist"},
    "ditto, cross-site": ("ditto", {"cross_site": True}),
    "feddag": ("feddag", WARM),
    "fedsm_extra": ("fedsm_extra", {"selector_rounds": 2}),
    "prr, personal model outside": ("prr", {"outside_model": "personal"}),
    "prr, no outside site": ("prr", {"outside": []}),
    "grace, probed": ("grace", {"probe": True}),
}
# Of rounds and epochs, and of the task.
NOT_COUNTS: Final = {
    *("selected_round", "round", "chosen", "versions", "stages", "learnt"),
    *("steps", "cluster", "annotated"),  # of the optimizer; a number of a cluster; structures
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey images; the brightness is the class."""
    root = tmp_path_factory.mktemp("shades")
    random = np.random.default_rng(0)
    for site, counts in IMAGES.items():
        (root / site / "images").mkdir(parents=True)
        rows = []
        for label, count in enumerate(counts):
            for number in range(count):
                rows.append(("training", label, number % PATIENTS[site][label]))
        for split, of_sites in (("validation", VALIDATION), ("test", TEST)):
            for label, count in enumerate(of_sites.get(site, USUAL)):
                rows += [(split, label, 100 + number) for number in range(count)]
        listed: dict[str, list[dict[str, Any]]] = {"training": [], "validation": [], "test": []}
        for place, (split, label, patient) in enumerate(rows):
            alike = site in TEST and split == "test" and label < 2 and patient < 103
            pixels = random.integers(0, 60, (16, 16)) + (40 if alike else 65 * label)
            name = f"images/{place}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(root / site / name)
            of_patient = f"{split}-{label}-{patient}"
            listed[split].append({"image": name, "label": label, "patient": of_patient})
        (root / site / "datalist.json").write_text(json.dumps(listed))
    return root


def numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """(place, number) for every number of the metadata, also in texts."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers(inner, f"{place}/{name}")
    elif isinstance(value, list | tuple):
        for row, inner in enumerate(value):
            yield from numbers(inner, f"{place}[{row}]")
    elif isinstance(value, str):
        yield from (
            (f"{place}: {value}", float(number))
            for number in re.findall(r"(?<![\w.+])\d+(?:\.\d+)?(?![\w.])", value)
        )
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, float(value)


def disclosures(message: Message, site: str) -> list[str]:
    """Where a message holds one of the site's counts by class, or its fraction of their sum."""
    counts = IMAGES[site][:3]
    secrets = []
    for count in counts:
        secrets += [float(count), count / sum(counts)]
    leaks = []
    for place, value in numbers(message.meta, "meta"):
        if any(abs(value - secret) < 1e-9 for secret in secrets):
            leaks.append(place)
    for entry, state in message.states.items():
        for name, tensor in state.items():
            # In which the tensor would hold a secret.
            dtype = tensor.dtype if tensor.is_floating_point() else torch.float64
            if torch.isin(tensor.double(), torch.tensor(secrets, dtype=dtype).double()).any():
                leaks.append(f"{entry}/{name}")
    return leaks


def small_numbers(value: Any, place: str) -> Iterator[str]:
    """Where metadata hold a whole number of 1 to 4, also in texts."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in NOT_COUNTS:
                yield from small_numbers(inner, f"{place}/{name}")
    elif isinstance(value, list | tuple):
        for row, inner in enumerate(value):
            yield from small_numbers(inner, f"{place}[{row}]")
    elif isinstance(value, str):
        yield from (f"{place}: {value}" for _ in re.findall(r"(?<![\w.])[1-4](?![\w.])", value))
    elif type(value) is int and 0 < value < MINIMUM:
        yield f"{place}: {value}"


@dataclass
class Observed:
    """A run whose sites have the settings and records of a startup kit.

    Attributes:
        leaks: (phase and site, where) of suppressed counts.
        open_counts: whether the enrollment of a site holds its counts by class.
        replies: (phase, site, metadata).
    """

    method: str
    options: dict[str, Any]
    outside: list[str]
    reason: str | None = None
    steps: list[tuple[str, int]] = field(default_factory=list)
    leaks: list[tuple[str, str]] = field(default_factory=list)
    open_counts: dict[str, bool] = field(default_factory=dict)
    replies: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def note(
        self, step: Step, outgoing: Mapping[str, Message], replies: Mapping[str, SiteReply]
    ) -> None:
        if step.phase not in (ENROL, FINALIZE):
            self.steps.append((step.phase, step.round))
        for site, message in outgoing.items():
            for of in SUPPRESSED:
                self.leaks += [(f"{step.phase} to {site}", at) for at in disclosures(message, of)]
        for site, reply in replies.items():
            assert reply.message is not None, reply.problem
            self.replies.append((step.phase, site, reply.message.meta))
            found = disclosures(reply.message, site)
            if site in SUPPRESSED:
                self.leaks += [(f"{step.phase} of {site}", at) for at in found]
            if step.phase == ENROL:
                self.open_counts[site] = bool(found)


@pytest.fixture(scope="module", params=RUNS)
def observed(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Observed:
    """A run of every method."""
    method, options = RUNS[request.param]
    outside = ["z"] if get_method(method).outside else []
    run = Observed(method, options, options.get("outside", outside))
    folder = tmp_path_factory.mktemp("records")
    make = Participant
    call = LocalExchange.__call__

    def participant(name: str, *args: Any, **more: Any) -> Participant:
        record = DataRecord(folder / name, data / name, "job", most_evaluations=1000)
        local = LocalSettings(minimum_patients=MINIMUM)
        return make(name, *args, **{**more, "local": local, "record": lambda: record})

    def noted(
        exchange: LocalExchange, step: Step, outgoing: dict[str, Message]
    ) -> dict[str, SiteReply]:
        replies = call(exchange, step, outgoing)
        run.note(step, outgoing, replies)
        return replies

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "Participant", participant)
        patched.setattr(LocalExchange, "__call__", noted)
        settings = {"outside": run.outside, "rounds": 2 * get_method(method).trains, **options}
        run.reason = run_local(method, TASK, SITES, seed=1, data_root=data, **settings)["reason"]
    return run


def test_no_message_of_any_method_holds_a_suppressed_count(observed: Observed) -> None:
    assert observed.reason is None
    assert observed.leaks == []
    expected = {site: site not in SUPPRESSED for site in (*SITES, *observed.outside)}
    assert observed.open_counts == expected, "other sites do send their counts"


def test_no_reply_of_any_method_holds_a_small_number(observed: Observed) -> None:
    small = set()
    for phase, site, meta in observed.replies:
        for place in small_numbers(meta, "meta"):
            small.add(f"{phase} of {site}: {place}")
    assert small == set()
    counts = [meta["n"] for _, site, meta in observed.replies if site == "a" and "n" in meta]
    assert counts
    for n in counts:
        assert "validation" not in n and n["train"] == 131
    assert any("some images left out" in json.dumps(meta) for _, _, meta in observed.replies)


def test_a_site_computes_the_schedule_of_each_method(observed: Observed) -> None:
    """The steps that the server asks, from a context without weights; the global random state is not touched."""
    method = get_method(observed.method)
    hyper = {name: value for name, value in observed.options.items() if name != "outside"}
    hyper.pop("cross_site", None)
    before = torch.get_rng_state()
    steps = schedule_of(method, method.plan(TASK, SITES, hyper), 0, 2)
    assert torch.equal(before, torch.get_rng_state())
    schedule = [(step.phase, step.round) for step in steps]
    if not observed.outside:
        schedule = schedule[: len(observed.steps)]
    assert schedule == (observed.steps if method.trains else [])
