"""One site: enrollment, suppressed metrics, notes of steps, working time, and the model that it deploys."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.optim import Optimizer

from medflare.core.errors import ConfigError, MessageError, StateError
from medflare.core.message import Message
from medflare.core.phases import extends
from medflare.core.specs import MetaSpec, number
from medflare.core.store import MemoryStore
from medflare.data.local import Bounds, LocalSettings
from medflare.federation.builtin_messages import ENROL_REPLY_META
from medflare.federation.final_models import SiteFolder, with_choice
from medflare.federation.participant import Participant
from medflare.federation.protocol import declaration_problem, message_problem
from medflare.federation.settings import FINALIZE
from medflare.inference.deployed import KEPT, load_model, plain_message
from medflare.methods import FeatureNetwork
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.training.epochs import train_epochs
from medflare.training.site import Site
from methods import squares


def enrolled(site: Site, method: str = "fedavg", **settings: Any) -> Participant:
    """A participant that has enrolled with 12 training, 4 validation and 5 test patients."""
    participant = squares.participant(site, method, **settings)
    squares.enrol(participant)
    return participant


def asked(participant: Participant, phase: str, number: int = 0, rounds: int = 1) -> Message:
    """The reply to one step."""
    incoming = Message(
        {"model": squares.site("A").network().state_dict()}, {"step": number, "run_rounds": rounds}
    )
    return participant.reply(phase, number, incoming)


def test_notes_of_the_data_are_limited_and_left_out_images_are_counted_only() -> None:
    site = squares.site("A")
    site.data = replace(
        site.data, left_out={f"{number}.png: damaged": str(number) for number in range(300)}
    )
    site.notes = ["第一季度眼底照片无法读取，" * 40] * 60  # six bytes of JSON for each character
    reply = squares.enrol(squares.participant(site))
    assert (
        message_problem(reply, "A") is None and declaration_problem(reply, ENROL_REPLY_META) is None
    )
    warnings = [event["message"] for event in reply.meta["events"] if event["kind"] == "warning"]
    (left_out,) = [
        event["message"] for event in reply.meta["events"] if event["kind"] == "left_out"
    ]
    assert len(warnings) == 21 and "40 more" in warnings[-1]
    assert "300" in left_out and ".png" not in str(reply.meta)
    assert reply.meta["versions"].keys() == {"medflare", "medflare code", "torch", "monai"}


@pytest.mark.parametrize(
    ("minimum", "validation", "test"),
    [(0, True, True), (4, True, True), (5, False, True), (6, False, False)],
)
def test_metrics_of_few_patients_are_suppressed(minimum: int, validation: bool, test: bool) -> None:
    site = squares.site("A")
    participant = squares.participant(site, local=LocalSettings(minimum_patients=minimum))
    replies = [
        squares.enrol(participant),
        asked(participant, "train"),
        asked(participant, FINALIZE, 1),
    ]
    enrolment, trained, delivered = (reply.meta for reply in replies)
    assert (trained["validation"]["global"] is not None) == validation and trained[
        "loss"
    ] is not None
    assert (delivered["metrics"]["global"]["dice"] is not None) == test and delivered["n"].get(
        "test"
    ) == (5 if test else None)
    messages = [event["message"] for event in enrolment["events"]]
    expected = [split for split, sent in (("validation", validation), ("test", test)) if not sent]
    assert len(messages) == len(expected)
    for split, line in zip(expected, messages, strict=True):
        assert split in line
    for reply in replies:
        assert message_problem(reply, "A") is None


def test_a_site_whose_role_changes_is_opened_again() -> None:
    """Only an inside site compares a task with its bounds of training."""
    roles: list[str] = []

    def opened(role: str) -> Site:
        roles.append(role)
        if role == "inside":
            raise ConfigError("beyond the site's bounds")
        return squares.site("A")

    participant = Participant("A", opened, get_method("fedavg"), {})
    for _ in range(2):
        squares.enrol(participant, "B", "C", role="outside")
    assert roles == ["outside"]
    with pytest.raises(ConfigError, match="beyond"):
        squares.enrol(participant)


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    class Full(SiteFolder):
        def finish(self, *arguments: Any) -> None:
            raise OSError("no space left beside scans/Meier.png")

    site = squares.site("A")
    folder = Full(tmp_path, "A", get_method("fedavg"), site.task, squares.SEED)
    participant = enrolled(site, folder=folder)
    asked(participant, "train")
    meta = asked(participant, FINALIZE, 1).meta
    assert meta["metrics"]["global"]["dice"] is not None
    warnings = [event["message"] for event in meta["events"] if event["kind"] == "warning"]
    assert len(warnings) == 1 and "OSError" in warnings[0] and "Meier" not in warnings[0]


def test_a_full_gpu_is_an_error_of_the_site() -> None:
    def full() -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    site = squares.site("A")
    participant = enrolled(site)
    site.abort = full
    with pytest.raises(ConfigError, match=r"site A.*batch_size"):
        asked(participant, "train")


def test_each_step_is_noted_when_it_begins_and_ends_also_if_it_fails() -> None:
    site = squares.site("A")
    notes: list[Any] = []
    participant = enrolled(site, note_step=lambda *step: notes.append(step))
    for turn, phase in enumerate(("train", FINALIZE)):
        asked(participant, phase, turn)
    site.abort = lambda: 1 / 0 > 1
    with pytest.raises(ZeroDivisionError):
        asked(participant, FINALIZE, 1)
    train = ("train", 0, 1)
    final = (FINALIZE, 1, 1)
    assert notes == [(*train, True), (*train, False), *[(*final, True), (*final, False)] * 2]


# ---- hours of a job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "hyper", "named"),
    [("prr", {}, "method, hyper"), ("ditto", {"site": {"lam": 0.5}}, "hyper")],
)
def test_another_run_does_not_continue_from_a_stored_state(
    method: str, hyper: dict[str, Any], named: str
) -> None:
    """Ditto's personal model stays; a job that resumes it with PRR would ask for it."""
    site = squares.site("A", squares.WITHOUT_BATCH_NORM)
    store = MemoryStore()

    def trained(participant: Participant, number: int) -> Message:
        numbers = {"step": number, "run_rounds": 9}
        incoming = Message({"model": site.network().state_dict()}, numbers)
        return participant.reply("train", number, incoming)

    def resume(participant: Participant) -> None:
        squares.enrol(participant, round=1, finished=1)

    trained(enrolled(site, "ditto", store=store), 0)
    other = squares.participant(site, method, hyper, store=store)
    refused = f"of a job with other {named};"
    with pytest.raises(StateError, match=refused):
        resume(other)
    with pytest.raises(StateError, match=refused):
        trained(other, 1)
    same = squares.participant(site, "ditto", store=store)
    resume(same)
    assert trained(same, 1).states


class Clock:
    """A monotonic clock on which every batch takes ten minutes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(
            "medflare.federation.memory.time", SimpleNamespace(monotonic=lambda: self.seconds)
        )

    def batch(self) -> bool:
        self.seconds += 600
        return False


def worked(clock: Clock, store: MemoryStore, hours: float | None) -> Participant:
    """A participant as a separate process makes it; two batches make its round."""
    site = squares.site("A")
    site.abort = clock.batch
    return squares.participant(site, store=store, hours=hours)


def test_a_site_stops_after_its_hours_but_evaluates_the_final_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    store = MemoryStore()
    squares.enrol(worked(clock, store, 2.0))
    done = 0
    with suppress(ConfigError):
        for done in range(20):
            clock.seconds += 10**6  # it waits for others
            asked(worked(clock, store, 2.0), "train", done, 20)
    assert 1 < done < 10
    with pytest.raises(ConfigError, match=r"bounds\.hours"):
        asked(worked(clock, store, 2.0), "train", done, 20)
    assert (
        asked(worked(clock, store, 2.0), FINALIZE, 20, 20).meta["metrics"]["global"]["dice"]
        is not None
    )


def test_a_new_run_has_separate_hours_and_without_a_limit_none_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    for _ in range(3):
        store = MemoryStore()
        squares.enrol(worked(clock, store, 1.5))
        asked(worked(clock, store, 1.5), "train")
    store = MemoryStore()
    squares.enrol(worked(clock, store, None))
    asked(worked(clock, store, None), "train", 0, 10**4)
    assert "work" not in store.names()


# -- the model that a site deploys -------------------------------------------------------------------------------------------


@pytest.fixture
def models() -> dict[str, Message]:
    """Three different networks."""
    site = squares.site("A")
    return {
        role: plain_message(site.network(role).state_dict())
        for role in ("global", "personal", "deployed")
    }


@pytest.mark.parametrize("role", ["global", "personal"])
def test_the_chosen_model_is_deployed(models: dict[str, Message], role: str) -> None:
    chosen, notes = with_choice(models, role)
    assert chosen["deployed"].states is models[role].states and KEPT not in models[role].meta
    assert chosen["deployed"].meta[KEPT] == {"keep": role, "model": role, "validation": {}}
    assert len(notes) == 1 and role in notes[0]


def test_without_a_choice_nothing_changes(models: dict[str, Message]) -> None:
    assert with_choice(models, None) == (models, []) and with_choice({}, "global") == ({}, [])
    alone = {"global": models["global"], "deployed": models["deployed"]}
    unchanged, (note,) = with_choice(alone, "personal")
    assert unchanged == alone and "personal" in note


@pytest.mark.parametrize("role", ["personal/../../another-job/deployed", "/tmp/deployed", ""])
def test_no_model_is_written_outside_of_the_sites_folder(tmp_path: Path, role: str) -> None:
    site = squares.site("A")
    folder = SiteFolder(tmp_path / "job", "A", get_method("ditto"), site.task, squares.SEED)
    with pytest.raises(StateError, match="outside of the site's folder"):
        folder.store(role, Message(), cast(Any, None))
    assert not [*tmp_path.iterdir()]


def test_the_choice_is_in_the_card_and_an_event(tmp_path: Any) -> None:
    site = squares.site("A")
    folder = SiteFolder(tmp_path, "A", get_method("ditto"), site.task, squares.SEED)
    participant = enrolled(site, "ditto", folder=folder, local=LocalSettings(keep="global"))
    asked(participant, "train")
    reply = asked(participant, FINALIZE, 1)
    weights = {
        role: load_model(tmp_path / role).message.states["model"]
        for role in ("global", "personal", "deployed")
    }
    assert squares.equal(weights["deployed"], weights["global"]) and not squares.equal(
        weights["deployed"], weights["personal"]
    )
    assert reply.meta["metrics"]["deployed"] == reply.meta["metrics"]["global"]
    assert any("'global'" in event["message"] for event in reply.meta["events"])
    cards = {role: load_model(tmp_path / role).card for role in ("global", "personal", "deployed")}
    assert cards["deployed"]["kept"] == {"keep": "global", "model": "global", "validation": {}}
    assert "kept" not in cards["global"] and "kept" not in cards["personal"]


def test_a_site_that_does_not_train_cannot_choose_a_personal_model() -> None:
    participant = Participant(
        "A",
        lambda role: squares.site("A"),
        get_method("ditto"),
        {},
        local=LocalSettings(keep="personal"),
    )
    with pytest.raises(ConfigError, match="personal"):
        squares.enrol(participant, "B", "C", role="outside")


# -- how many sites' updates are combined ----------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "hyper", "combined", "refused"),
    [
        ("fedavg", {}, {}, False),
        ("fedavg", {}, {"combined_sites": 2}, False),
        ("fedavg", {}, {"combined_sites": 1}, True),
        ("robust", {"rule": "median"}, {}, False),
        ("robust", {"rule": "krum"}, {}, True),
        ("robust", {"rule": "krum"}, {"combined_sites": 2}, True),
        ("robust", {"rule": "geometric"}, {}, True),
        ("ifca", {"clusters": 2}, {}, True),  # a site may be alone in its cluster
        ("ifca", {"clusters": 1}, {}, False),
    ],
)
def test_a_site_whose_update_may_be_used_alone_does_not_train(
    method: str, hyper: dict[str, Any], combined: dict[str, Any], refused: bool
) -> None:
    site = squares.site("A")
    local = LocalSettings(bounds=Bounds(inside_sites=2))
    participant = squares.participant(site, method, hyper, local=local)
    if refused:
        with pytest.raises(ConfigError, match=r"updates of 1 inside sites; bounds\.inside_sites"):
            squares.enrol(participant, **combined)
    else:
        squares.enrol(participant, **combined)


def test_a_rule_of_another_package_may_take_one_sites_model() -> None:
    rules = [SimpleNamespace(rule=rule) for rule in ("median", "lab_largest")]
    assert [FedAvgServer.fewest_combined(rule, 4) for rule in rules] == [4, 1]


class Undisturbed(FedAvgSite):
    """Has the hyper-parameters of DP-SGD, and trains without."""

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        return train_epochs(model, optimizer, self.site, round, "model")


NORM = MetaSpec[float]("norm", "norm of the training images", number())


class Telling(FedAvgSite):
    """Sends a number of the training images beside the protected model."""

    @extends(meta=(NORM,))
    def train(self, round: int, incoming: Message) -> Message:
        reply = super().train(round, incoming)
        reply[NORM] = self.site.data.train.images.norm().item()
        return reply


def test_what_dp_sgd_has_not_protected_does_not_leave_a_private_run() -> None:
    pytest.importorskip("opacus", reason="needs medflare[privacy]")
    site = squares.site(
        "A", squares.task(network={"name": "unet", "channels": [4, 8], "norm": "instance"})
    )
    model = site.network().state_dict()
    refusals = {
        FedAvgSite: "",
        Undisturbed: "fedavg has trained model in 'train' without DP",
        Telling: "'norm' of method fedavg leaves without the noise of DP-SGD",
    }
    for algorithm, refusal in refusals.items():
        method = replace(get_method("fedavg"), site=algorithm)
        participant = squares.participant(site, method, {"dp_noise": 1.0})
        squares.enrol(participant)
        request = Message({"model": model}, {"step": 1, "run_rounds": 1})
        if not refusal:
            assert participant.reply("train", 0, request).states["model"].keys() == model.keys()
        else:
            with pytest.raises(ConfigError, match=refusal):
                participant.reply("train", 0, request)


@pytest.mark.parametrize("wrong", [{"combined_sites": 0}, {"sites": ["A", "A"]}])
def test_an_invitation_that_miscounts_the_inside_sites_is_refused(wrong: dict[str, Any]) -> None:
    site = squares.site("A")
    local = LocalSettings(bounds=Bounds(inside_sites=2))
    participant = squares.participant(site, local=local)
    with pytest.raises(MessageError, match=next(iter(wrong))):
        squares.enrol(participant, **wrong)


@pytest.mark.parametrize(
    ("method", "hyper", "bounds", "named"),
    [
        ("finetune", {"tuning_epochs": 5}, {"epochs": 4}, "tuning_epochs 5, bounds.epochs"),
        ("finetune", {"tuning_epochs": 4}, {"epochs": 4}, ""),
        ("fedrep", {"body_epochs": None}, {"epochs": 10}, ""),
        # Adapters that are larger than the network, which has 3400 bytes.
        ("fedlora", {"rank": 256}, {"model_bytes": 10_000}, "'model', bounds.model_bytes"),
        ("fedlora", {"rank": 8}, {"model_bytes": 10_000}, ""),
    ],
)
def test_a_method_is_within_the_bounds_of_a_site(
    method: str, hyper: dict[str, Any], bounds: dict[str, Any], named: str
) -> None:
    site = squares.site("A")
    local = LocalSettings(bounds=Bounds(**bounds))
    participant = squares.participant(site, method, hyper, local=local)
    if named:
        with pytest.raises(ConfigError, match=named):
            squares.enrol(participant)
    else:
        squares.enrol(participant)


@pytest.mark.parametrize(
    ("method", "hyper", "refused"),
    [
        ("fedprox", {"mu": 1.0}, False),
        ("fedprox", {"mu": 1e6}, True),
        ("feddyn", {"alpha": 1e6}, True),
    ],
)
def test_a_proximal_term_does_not_make_a_model_of_one_step(
    method: str, hyper: dict[str, Any], refused: bool
) -> None:
    local = LocalSettings(minimum_patients=5)
    participant = squares.participant(squares.site("A"), method, hyper, local=local)
    if refused:
        with pytest.raises(ConfigError, match="proximal term"):
            squares.enrol(participant)
    else:
        squares.enrol(participant)


def test_a_server_cannot_ask_for_a_proximal_term_that_makes_a_model_of_one_step() -> None:
    local = LocalSettings(minimum_patients=5)
    participant = squares.participant(squares.site("A"), "fedmtl", {}, local=local)
    squares.enrol(participant)
    states = {"model": squares.site("A").network().state_dict()}
    incoming = Message(states, {"step": 0, "run_rounds": 1, "strength": 1e6})
    with pytest.raises(ConfigError, match="proximal term"):
        participant.reply("train", 0, incoming)
