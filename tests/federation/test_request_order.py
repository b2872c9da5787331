"""The order of a server's requests: what a hostile server asks is refused, what an honest one repeats is answered."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.errors import ConfigError, MessageError
from medflare.core.message import Message
from medflare.core.store import MemoryStore
from medflare.data.local import Bounds, LocalSettings
from medflare.federation.builtin_messages import FEDERATION_SHARES
from medflare.federation.data_record import DataRecord
from medflare.federation.participant import Participant
from medflare.federation.settings import FINALIZE
from medflare.methods.catalogue import get_method
from methods import squares

ROUNDS = 3
HONEST = [("train", 0), ("train", 1), ("train", 2), ("validate", 3), (FINALIZE, 3)]


def participant(store: MemoryStore | None = None, **settings: Any) -> Participant:
    site = squares.site("A")
    asked = squares.participant(site, store=store or MemoryStore(), **settings)
    if store is None:
        squares.enrol(asked)
    return asked


def ask(
    asked: Participant, step: int, phase: str, round: int, rounds: int = ROUNDS, shift: float = 0.0
) -> Message:
    model = {
        name: tensor + shift if tensor.is_floating_point() else tensor
        for name, tensor in squares.start().items()
    }
    return asked.reply(
        phase, round, Message({"model": model}, {"step": step, "run_rounds": rounds})
    )


@pytest.mark.parametrize("missed", [(), (0,), (1, 2), (3,), (0, 1, 2)])
def test_an_honest_server_is_answered_also_where_the_site_missed_steps(
    missed: tuple[int, ...],
) -> None:
    asked = participant()
    for step, (phase, round) in enumerate(HONEST):
        if step not in missed:
            reply = ask(asked, step, phase, round)
            assert reply.states if phase == "train" else reply.meta


def test_a_step_is_answered_again_with_the_same_models_only() -> None:
    asked = participant()
    ask(asked, 0, "train", 0)
    ask(asked, 0, "train", 0)
    with pytest.raises(MessageError, match="other models"):
        ask(asked, 0, "train", 0, shift=1e-3)
    ask(asked, 4, FINALIZE, 3)
    ask(asked, 4, FINALIZE, 3)
    with pytest.raises(MessageError, match="other models"):
        ask(asked, 4, FINALIZE, 3, shift=1e-3)
    with pytest.raises(MessageError, match="no such step now"):
        ask(asked, 5, FINALIZE, 3, shift=1e-3)


@pytest.mark.parametrize(
    ("before", "request_", "reason"),
    [
        ([], (0, FINALIZE, 3), "no step of the schedule before"),
        ([], (0, FINALIZE, 0), "no step of the schedule before"),
        ([], (0, "train", 7), "no such step"),
        ([], (0, "train", 3), "no such step"),
        ([(0, "train", 0)], (1, FINALIZE, 1), "no such step"),
        ([(0, "train", 0), (1, "train", 1)], (2, "train", 0), "no such step"),
        ([(0, "train", 0), (1, "train", 1)], (2, "train", 1), "no such step"),
        ([(0, "train", 0), (1, "train", 1)], (1, "train", 2), "in another round"),
        ([(0, "train", 0), (1, "validate", 3)], (2, "validate", 3), "no such step"),
        ([(0, "train", 0), (1, "validate", 3)], (2, "train", 1), "no such step"),
        ([(0, "train", 0), (1, FINALIZE, 3)], (2, "train", 1), "no such step"),
        ([(0, "train", 0), (1, FINALIZE, 3)], (2, "validate", 3), "no such step"),
    ],
)
def test_a_request_out_of_order_is_refused(before: list[Any], request_: Any, reason: str) -> None:
    asked = participant()
    for earlier in before:
        ask(asked, *earlier)
    with pytest.raises(MessageError, match=reason):
        ask(asked, *request_)


def test_a_run_has_no_more_rounds_than_it_began_with_and_than_the_site_allows() -> None:
    asked = participant(local=LocalSettings(bounds=Bounds(rounds=5)))
    ask(asked, 0, "train", 0)
    with pytest.raises(MessageError, match="had 3 before"):
        ask(asked, 1, "train", 1, rounds=4)
    ask(asked, 1, "train", 1, rounds=2)  # training stopped early
    with pytest.raises(MessageError, match=r"bounds\.rounds"):
        ask(participant(local=LocalSettings(bounds=Bounds(rounds=2))), 0, "train", 0)


def test_a_site_that_joins_after_the_last_round_gets_its_models() -> None:
    site = squares.site("A")
    late = squares.participant(site)
    squares.enrol(late, round=ROUNDS)
    assert ask(late, 4, FINALIZE, ROUNDS).meta["metrics"]["global"]["dice"] is not None


def test_an_outside_site_trains_for_nobody() -> None:
    site = squares.site("A")
    outside = squares.participant(site)
    squares.enrol(outside, "B", "C", role="outside")
    for phase in ("train", "validate"):
        with pytest.raises(MessageError, match="outside site"):
            ask(outside, 0, phase, 0)
    ask(outside, 4, FINALIZE, ROUNDS)


def test_another_process_of_the_site_knows_what_was_asked_and_a_second_enrolment_changes_nothing() -> (
    None
):
    store = MemoryStore()
    squares.enrol(participant(store))
    ask(participant(store), 0, "train", 0)
    ask(participant(store), 1, "train", 1)
    squares.enrol(participant(store))
    with pytest.raises(MessageError, match="no such step now, after 'train' of round 2"):
        ask(participant(store), 0, "train", 0)


def test_a_site_that_has_finished_does_not_begin_the_run_anew() -> None:
    """Its memory would be lost, and the last evaluation asked again of another model."""
    asked = participant()
    for step, (phase, round) in enumerate(HONEST):
        ask(asked, step, phase, round)
    for finished in (0, len(HONEST) - 2):
        with pytest.raises(MessageError, match="has finished this run"):
            squares.enrol(asked, finished=finished)
    squares.enrol(asked, finished=len(HONEST) - 1)


def test_evaluations_of_a_study_are_counted_over_all_jobs(tmp_path: Any) -> None:
    (tmp_path / "datalist.json").write_text("{}")
    for job in range(3):
        record = DataRecord(tmp_path / "record", tmp_path, f"job-{job}", most_evaluations=2)
        asked = participant(record=lambda record=record: record)
        ask(asked, 0, "train", 0)
        if job == 2:
            with pytest.raises(Exception, match=r"bounds\.evaluations"):
                ask(asked, 4, FINALIZE, ROUNDS)
            continue
        for _ in range(2):  # the same one again is no other evaluation
            ask(asked, 4, FINALIZE, ROUNDS)
    rows = (tmp_path / "record" / "evaluations.csv").read_text().splitlines()
    assert len(rows) == 3 and "job-0" in rows[1] and "job-1" in rows[2]


def test_metrics_on_validation_images_are_counted_over_all_jobs(tmp_path: Path) -> None:
    """A server can ask by each model whether a pixel of a patient is above a value."""
    (tmp_path / "datalist.json").write_text("{}")
    for job in range(3):
        record = DataRecord(tmp_path / "record", tmp_path, f"job-{job}", 9, most_validations=2)
        asked = participant(record=lambda record=record: record)
        if job == 2:
            with pytest.raises(ConfigError, match=r"reported 2 metrics .* bounds\.validations"):
                ask(asked, 0, "train", 0)
            continue
        metrics = ask(asked, 0, "train", 0).meta["validation"]
        assert len(metrics) == 1 and None not in metrics.values()
    assert json.loads((tmp_path / "record" / "validations.json").read_text()) == {"models": 2}


def test_a_mean_that_validation_images_choose_is_counted(tmp_path: Path) -> None:
    """FedFomo's model depends on the loss of each model that the server sends."""
    (tmp_path / "datalist.json").write_text("{}")
    record = DataRecord(tmp_path / "record", tmp_path, "job", 9)
    site = squares.site("A", squares.CLASSIFICATION)
    asked = squares.participant(site, "fedfomo", record=lambda: record)
    squares.enrol(asked)
    models: dict[str, dict[str, torch.Tensor]] = {}
    for number, name in enumerate("AB"):
        for entry, tensor in site.network().state_dict().items():
            models.setdefault(f"personal/{name}", {})[entry] = tensor + number
    asked.reply("train", 0, Message({}, {"step": 0, "run_rounds": 3}))
    before = json.loads((tmp_path / "record" / "validations.json").read_text())["models"]
    asked.reply("train", 1, Message(models, {"step": 1, "run_rounds": 3}))
    after = json.loads((tmp_path / "record" / "validations.json").read_text())["models"]
    assert before == 1 and after - before == 4  # the start, both models, and the trained one


@pytest.mark.parametrize("answer", ["undefined", "an error"])
def test_an_undefined_metric_and_an_error_are_answers_too(
    tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights can be such that a metric is undefined if a pixel of a patient is above a value."""
    (tmp_path / "datalist.json").write_text("{}")
    record = DataRecord(tmp_path / "record", tmp_path, "job", 9, most_validations=2)
    for question in range(3):
        asked = participant(record=lambda: record)

        def measured(*_: Any) -> None:
            if answer == "an error":
                raise ArithmeticError(answer)

        monkeypatch.setattr("medflare.methods.base.SiteAlgorithm.validation", measured)
        if question == 2:
            with pytest.raises(ConfigError, match=r"bounds\.validations"):
                ask(asked, 0, "train", 0)
        elif answer == "an error":
            with pytest.raises(ArithmeticError):
                ask(asked, 0, "train", 0)
        else:
            assert ask(asked, 0, "train", 0).meta["validation"] == {"global": None}


@pytest.mark.parametrize("most", [2, 3])
def test_scores_of_many_models_are_as_many_metrics(tmp_path: Path, most: int) -> None:
    """SHA's sites score a model of each site: a server can send 1000 of its choice in a step."""
    (tmp_path / "datalist.json").write_text("{}")
    record = DataRecord(tmp_path / "record", tmp_path, "job", 9, most_validations=most)
    sites = ["A", "B", "C"]
    site = squares.site("A", squares.CLASSIFICATION)
    sha = get_method("sha")
    asked = squares.participant(site, sha, record=lambda: record)
    squares.enrol(asked, *sites)
    model = site.network().state_dict()
    candidates = {f"candidate/{name}": model for name in sites}
    request = Message(candidates, {"step": 1, "run_rounds": 9})
    if most == 3:
        assert len(asked.reply("score", 0, request).meta["scores"]) == 3
    else:
        with pytest.raises(ConfigError, match=r"bounds\.validations"):
            asked.reply("score", 0, request)


def test_the_last_step_is_answered_again_with_the_same_adaptation_only() -> None:
    """Another one would be another evaluation on the test images."""
    asked = participant()
    ask(asked, 0, "train", 0)

    def finalize(**more: Any) -> Message:
        words = {"step": 4, "run_rounds": ROUNDS, **more}
        return asked.reply(FINALIZE, ROUNDS, Message({"model": squares.start()}, words))

    first, second = (finalize(adapt="dsbn").meta["metrics"] for _ in range(2))
    assert first == second and first["dsbn"]["dice"] is not None
    shares = {"adapt": "dsbn", FEDERATION_SHARES.name: [0.5, 0.5]}
    for more in ({}, {"adapt": "tent"}, shares):
        with pytest.raises(MessageError, match="another adaptation"):
            finalize(**more)


def test_a_torn_line_of_the_evaluations_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "datalist.json").write_text("{}")
    record = DataRecord(tmp_path / "record", tmp_path, "job", most_evaluations=6)
    for models in (2, 1):
        record = replace(record, job=f"job-{models}")
        record.note_evaluation(FINALIZE, models, "A")
    file = record.folder / "evaluations.csv"
    file.write_bytes(file.read_bytes()[:-14])  # inside the second row
    record.note_evaluation(FINALIZE, 2, "A")
    with pytest.raises(ConfigError, match="evaluated 5 models"):  # the torn line is of one
        record.note_evaluation(FINALIZE, 2, "A")
    with file.open() as rows:
        assert [row["models"] for row in csv.DictReader(rows)] == ["2", "", "2"]


def test_evaluations_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datalist.json").write_text("{}")
    record = DataRecord(tmp_path / "record", tmp_path, "job", most_evaluations=6)
    record.note_evaluation(FINALIZE, 1, "A")
    file = record.folder / "evaluations.csv"
    before = file.read_bytes()

    def full(*paths: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        record.note_evaluation(FINALIZE, 1, "A")
    assert file.read_bytes() == before


def test_a_refused_evaluation_is_refused_again(tmp_path: Path) -> None:
    (tmp_path / "datalist.json").write_text("{}")
    record = DataRecord(tmp_path / "record", tmp_path, "job", most_evaluations=1)
    replace(record, job="earlier").note_evaluation(FINALIZE, 1, "A")
    asked = participant(record=lambda: record)
    ask(asked, 0, "train", 0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"bounds\.evaluations"):
            ask(asked, 4, FINALIZE, ROUNDS)


def invited_outside(
    method: str, record: DataRecord, inside: list[str], **hyper: Any
) -> Participant:
    site = squares.site("A")
    asked = squares.participant(site, method, hyper, record=lambda: record)
    squares.enrol(asked, *inside, role="outside")
    return asked


def test_each_model_of_a_final_reply_is_an_evaluation(tmp_path: Path) -> None:
    """A server that names 20 sites has 20 experts of its choice evaluated."""
    (tmp_path / "datalist.json").write_text("{}")
    inside = [f"S{number:02d}" for number in range(20)]
    for most in (20, 200):
        record = DataRecord(tmp_path / str(most), tmp_path, "job", most_evaluations=most)
        asked = invited_outside("iop_fl", record, inside, comparisons=True, route_epochs=0)
        states = {"model": squares.start()} | {f"expert/{name}": squares.start() for name in inside}
        request = Message(states, {"step": 5, "run_rounds": 1})
        if most == 20:
            with pytest.raises(ConfigError, match=r"bounds\.evaluations"):
                asked.reply(FINALIZE, 1, request)
            continue
        metrics = asked.reply(FINALIZE, 1, request).meta["metrics"]
        assert len(metrics) > 20
        with (record.folder / "evaluations.csv").open() as rows:
            assert 20 < sum(int(row["models"]) for row in csv.DictReader(rows)) <= len(metrics)


def test_a_final_request_is_not_asked_again_with_other_metadata() -> None:
    """By other values of gamma a server would find the selector's score of every test patient."""
    fedsm = get_method("fedsm")
    site = squares.site("A")
    plan = fedsm.plan(site.task, ("B", "C"), {})
    states = {}
    for item in fedsm.site_class.phase(FINALIZE).request:
        for name, member in item.members(plan).items():
            shapes = member.spec(plan).tensors
            states[name] = {
                key: torch.zeros(shape, dtype=kind) for key, (shape, kind) in shapes.items()
            }
    asked = squares.participant(site, fedsm)
    squares.enrol(asked, "B", "C", role="outside")

    def finalize(gamma: float) -> Message:
        meta = {
            "gamma": gamma,
            "sites": ["B", "C"],
            "choose_by": "image",
            "selector": {"name": "ridge_selector"},
        }
        return asked.reply(FINALIZE, 1, Message(states, {"step": 5, "run_rounds": 1, **meta}))

    assert finalize(0.5).meta["metrics"] == finalize(0.5).meta["metrics"]
    with pytest.raises(MessageError, match="other metadata"):
        finalize(0.6)


def test_a_site_does_not_enrol_anew_with_another_start_after_a_step() -> None:
    """The same final request would else evaluate another model, as the repetition of the first."""
    asked = participant()
    ask(asked, 0, "train", 0)
    squares.enrol(asked)
    for change in ({"sites": ["A", "C"]}, {"role": "outside", "sites": ["B", "C"]}):
        with pytest.raises(MessageError, match="another start; start a new job"):
            squares.enrol(asked, **change)
