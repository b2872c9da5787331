"""The outbound guard: what the manifest and the site allow leaves, and nothing else."""

import csv
import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.private.fed.client.client_runner import ClientRunnerConfig, TaskRouter
from nvflare.private.privacy_manager import Scope

from helpers.small_tasks import small_task
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.federation.settings import META_LIMIT
from medflare.flare.guard import OutboundGuard
from medflare.flare.messages import error_of, register_decomposers, to_message, to_shareable
from medflare.flare.participants import RESULT_CONTEXT, ParticipantSpec, ResultContext
from medflare.methods.catalogue import get_method

SITE = "clinic"


@pytest.fixture
def task() -> Any:
    return small_task()


@pytest.fixture
def spec(tmp_path: Path, task: Any) -> ParticipantSpec:
    (tmp_path / "task.json").write_text(json.dumps(task.to_dict()))
    StateStore(tmp_path / "medflare" / "state").save(
        "membership", Message({}, {"site": SITE, "sites": [SITE, "other"], "role": "inside"})
    )
    task_file = tmp_path / "task.json"
    local_file = tmp_path / "medflare.json"
    folder = tmp_path / "medflare"
    return ParticipantSpec(SITE, "fedavg", "", 0, task_file, local_file, folder)


def prepared(spec: ParticipantSpec, phase: str = "train") -> FLContext:
    """FLARE's context while the site answers to a phase of round 4."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, SITE)
    fl_ctx.set_prop(RESULT_CONTEXT, ResultContext(phase, 4, spec), private=True, sticky=False)
    return fl_ctx


@pytest.fixture
def context(spec: ParticipantSpec) -> FLContext:
    return prepared(spec)


@pytest.fixture
def update(task: Any) -> Message:
    """What FedAvg's site algorithm sends: real tensors for the manifest's shapes."""
    template = get_method("fedavg").plan(task, (SITE, "other"), {}).template()
    model = {
        name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in template.items()
    }
    return Message({"model": model}, {"n_samples": 12, "loss": 0.5, "validation": {"global": 0.7}})


def blocked(result: Shareable) -> str:
    """The one line that is sent instead; fails if any data are."""
    assert "DXO" not in result and "FL_MODEL" not in result
    with pytest.raises(Exception, match="message"):
        to_message(result)
    return error_of(result) or ""


def report(spec: ParticipantSpec) -> list[dict[str, str]]:
    with (spec.folder / "outbound.csv").open() as file:
        return list(csv.DictReader(file))


def test_what_is_declared_leaves_and_is_reported(
    context: FLContext, spec: ParticipantSpec, update: Message
) -> None:
    sent = to_message(OutboundGuard().process(to_shareable(update), context))
    assert sent.meta == update.meta and sent.states.keys() == {"model"}
    for name, tensor in update.states["model"].items():
        assert sent.states["model"][name].equal(tensor)
    model, *meta = report(spec)
    assert (model["phase"], model["round"], model["entry"], model["sent"]) == (
        "train",
        "4",
        "model",
        "yes",
    )
    assert int(model["bytes"]) == update.nbytes and int(model["tensors"]) == len(
        update.states["model"]
    )
    assert model["purpose"]
    assert [(row["entry"], int(row["bytes"]), row["sent"]) for row in meta] == [
        ("loss", len("0.5"), "yes"),
        ("n_samples", len("12"), "yes"),
        ("validation", len('{"global": 0.7}'), "yes"),
    ]


def test_a_personal_model_leaves_only_with_the_sites_consent(
    spec: ParticipantSpec, update: Message
) -> None:
    context = prepared(spec, "finalize")
    final = Message(
        {"personal": update.states["model"]},
        {"metrics": {"global": {"dice": 0.5}}, "n": {"train": 1}},
    )
    assert "personal" in blocked(OutboundGuard().process(to_shareable(final), context))
    spec.local_file.write_text('{"share_model": true}')
    assert to_message(OutboundGuard().process(to_shareable(final), context)).states.keys() == {
        "personal"
    }
    final.states["personal"]["scan"] = torch.ones(3)
    assert "scan" in blocked(OutboundGuard().process(to_shareable(final), context))


# ---- what a filter or an executor adds behind the declaration ------------------------------------------------------------

SECRET = "Meier_Anna_1957"
PIXELS = np.frombuffer(SECRET.encode(), np.uint8)


def contents(result: Shareable) -> bytes:
    """What FLARE would send of a result."""
    register_decomposers()
    return result.to_bytes()


def parts(shareable: Shareable) -> dict[str, DXO]:
    return from_shareable(shareable).data


class Hiding(str):
    """Text with something behind it."""

    hidden = SECRET


BESIDE: dict[str, Callable[[Shareable], object]] = {
    "an array under a key of its own": lambda s: s.update(patients=PIXELS),
    "text under a key of its own": lambda s: s.update(patients={"name": [SECRET]}),
    "a message under a key of its own": lambda s: s.update(
        more=DXO(DataKind.WEIGHTS, {"x": PIXELS}).to_shareable()
    ),
    "the collection's meta": lambda s: s["DXO"]["meta"].update(patients=PIXELS),
    "beside the collection": lambda s: s["DXO"].update(patients=PIXELS),
    "a state's meta": lambda s: parts(s)["model"].set_meta_prop("patients", PIXELS),
    "nested in a state's meta": lambda s: parts(s)["model"].set_meta_prop(
        "a", {"b": [DXO(DataKind.WEIGHTS, {"x": PIXELS}).to_dict()]}
    ),
    "names of bfloat16 that there are not": lambda s: parts(s)["model"].set_meta_prop(
        "bfloat16", [SECRET]
    ),
    "the meta' meta": lambda s: parts(s)["meta"].set_meta_prop("patients", SECRET),
    "a header of few letters": lambda s: s.set_header("patient", SECRET),
    "a cookie": lambda s: s.set_header(ReservedHeaderKey.COOKIE_JAR, SECRET),
}


@pytest.mark.parametrize("hide", BESIDE.values(), ids=BESIDE)
def test_what_lies_beside_the_message_stays(
    context: FLContext, spec: ParticipantSpec, update: Message, hide: Callable[..., object]
) -> None:
    sent = to_shareable(update)
    hide(sent)
    assert SECRET.encode() in contents(sent), "it would have left"
    left = OutboundGuard().process(sent, context)
    assert left.get_return_code() == ReturnCode.OK and SECRET.encode() not in contents(left)
    assert to_message(left).meta == update.meta
    assert sum(int(row["bytes"]) for row in report(spec)) == update.nbytes + sum(
        len(json.dumps(item)) for item in update.meta.values()
    )


UNDECLARED: dict[str, tuple[Callable[[Message], object], str]] = {
    "an entry": (lambda m: m.states.update(images={"scan": torch.ones(3)}), "images"),
    "a tensor more": (lambda m: m.states["model"].update(patient=torch.ones(3)), "patient"),
    "a tensor less": (lambda m: m.states["model"].popitem(), "model"),
    "another shape": (
        lambda m: m.states["model"].update({next(iter(m.states["model"])): torch.ones(2)}),
        "(2,)",
    ),
    "too much metadata": (lambda m: m.meta.update(pixels=list(range(META_LIMIT))), "bytes"),
    "a tensor as metadata": (lambda m: m.meta.update(pixels=torch.ones(3)), "meta"),
    "a metadata item": (lambda m: m.meta.update(patients=SECRET), "patients"),
    "a metadata item of another phase": (lambda m: m.meta.update(metrics={SECRET: {}}), "metrics"),
    "text for a number": (lambda m: m.meta.update(loss=SECRET), "loss"),
    "text for a metric": (lambda m: m.meta.update(validation={"global": SECRET}), "validation"),
    "nested in a metric": (
        lambda m: m.meta.update(validation={"global": {"patients": [SECRET]}}),
        "validation",
    ),
    "in place of a count": (lambda m: m.meta.update(n_samples=[SECRET]), "n_samples"),
    "an event of no kind": (
        lambda m: m.meta.update(events=[{"kind": SECRET, "message": "x"}]),
        "events",
    ),
    "more in an event": (
        lambda m: m.meta.update(events=[{"kind": "warning", "message": "x", "patient": SECRET}]),
        "events",
    ),
    "in another's name": (
        lambda m: m.meta.update(events=[{"kind": "warning", "message": SECRET, "site": "B"}]),
        "events",
    ),
}


@pytest.mark.parametrize(("spoil", "token"), UNDECLARED.values(), ids=UNDECLARED)
def test_what_is_not_declared_blocks_the_reply(
    context: FLContext,
    spec: ParticipantSpec,
    update: Message,
    spoil: Callable[..., object],
    token: str,
) -> None:
    spoil(update)
    left = OutboundGuard().process(to_shareable(update), context)
    line = blocked(left)
    assert token in line and SITE in line
    assert SECRET.encode() not in contents(left), "the reason names the item and not its value"
    (row,) = report(spec)
    assert row["sent"] == "no" and token in row["purpose"]


@pytest.mark.parametrize("phase", ["enrol", "finalize"])
def test_metadata_of_enrollment_and_final_models_is_declared(
    spec: ParticipantSpec, phase: str
) -> None:
    fl_ctx = prepared(spec, phase)
    meta: dict[str, Any] = {
        "n": {"train": 3},
        **({"class_counts": []} if phase == "enrol" else {"metrics": {"global": {"dice": 0.5}}}),
    }
    assert (
        to_message(OutboundGuard().process(to_shareable(Message({}, dict(meta))), fl_ctx)).meta
        == meta
    )
    left = OutboundGuard().process(to_shareable(Message({}, {**meta, "patients": SECRET})), fl_ctx)
    assert "'patients'" in blocked(left) and SECRET.encode() not in contents(left)


def test_metadata_leaves_as_plain_values(context: FLContext, update: Message) -> None:
    update.meta["validation"] = {Hiding("global"): np.float64(0.5)}
    meta = to_message(OutboundGuard().process(to_shareable(update), context)).meta
    ((name, value),) = meta["validation"].items()
    assert (type(name), type(value), name, value) == (str, float, "global", 0.5)


FAILED: dict[str, Callable[[Shareable], object]] = {
    "data": lambda s: s.update(patients=PIXELS),
    "a return code that is none": lambda s: s.set_return_code(SECRET),
    "an array for a return code": lambda s: s.set_return_code(PIXELS),
    "an array for a reason": lambda s: s.set_header("medflare.error", PIXELS),
    "a header": lambda s: s.set_header("patients", SECRET),
    "headers that are none": lambda s: s.update({ReservedHeaderKey.HEADERS: [SECRET]}),
}


@pytest.mark.parametrize("hide", FAILED.values(), ids=FAILED)
def test_a_failed_task_hides_nothing(context: FLContext, hide: Callable[..., object]) -> None:
    failed = make_reply(ReturnCode.BAD_TASK_DATA)
    hide(failed)
    left = OutboundGuard().process(failed, context)
    assert (
        left.get_return_code() in vars(ReturnCode).values()
        and left.get_return_code() != ReturnCode.OK
    )
    assert SECRET.encode() not in contents(left) and left.keys() == {ReservedHeaderKey.HEADERS}


def test_a_reason_is_one_short_line_without_folders(context: FLContext) -> None:
    reply = make_reply(
        ReturnCode.EXECUTION_EXCEPTION,
        {"medflare.error": f"/srv/Klinik {SECRET}/kit A/x.json\n cannot be read " + "x" * 5000},
    )
    line = blocked(OutboundGuard().process(reply, context))
    assert "Klinik" not in line and "kit A" not in line
    path = "/srv/kit (old)/Meier, O'Hans [1950]/local/medflare.json"
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION, {"medflare.error": f"{path}: not JSON"})
    assert blocked(OutboundGuard().process(reply, context)).endswith("medflare.json: not JSON")
    assert (
        SECRET not in line and "\n" not in line and len(line) <= 1000 and "cannot be read" in line
    )


# ---- filters of the job --------------------------------------------------------------------------------------------------


class Adding(FLComponent):
    """A filter of a job that hands over what the executor made."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        shareable["patients"] = PIXELS
        return shareable


@pytest.mark.parametrize("tasks", [["train"], ["another"]])
def test_a_job_that_names_result_filters_is_refused_and_none_of_them_runs(
    context: FLContext, update: Message, tasks: list[str]
) -> None:
    """As FLARE's runner does it: the site's filters first, then the job's."""
    scope = Scope()
    scope.add_task_result_filter(OutboundGuard(), FilterKey.OUT)
    table = {f"{task}{FilterKey.DELIMITER}{FilterKey.OUT}": [Adding()] for task in tasks}
    config = ClientRunnerConfig(TaskRouter(), {}, table)
    context.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    context.set_prop(
        FLContextKey.RUNNER,
        SimpleNamespace(task_result_filters=config.task_result_filters),
        private=True,
    )
    for result in (to_shareable(update), make_reply(ReturnCode.EXECUTION_EXCEPTION)):
        with pytest.raises(UnsafeJobError, match="Adding"):
            apply_filters(
                Scope.TASK_RESULT_FILTERS_NAME,
                result,
                context,
                config.task_result_filters,
                "train",
                FilterKey.OUT,
            )
        assert "patients" not in result


def test_headers_carry_no_data(context: FLContext, update: Message) -> None:
    shareable = to_shareable(update)
    shareable.set_header("notes", torch.ones(4))
    assert "notes" in blocked(OutboundGuard().process(shareable, context))


def test_a_failed_task_sends_its_line_and_nothing_else(
    context: FLContext, spec: ParticipantSpec, update: Message
) -> None:
    failed = to_shareable(update)
    failed.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    failed.set_header("medflare.error", "no images")
    result = OutboundGuard().process(failed, context)
    assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert blocked(result) == "no images"
    (row,) = report(spec)
    assert (row["entry"], row["purpose"], row["sent"]) == ("error", "no images", "yes"), (
        "the line leaves, too"
    )


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_full_disk_cannot_record_does_not_leave(
    context: FLContext, update: Message, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", f"/srv/{SECRET}/outbound.csv")
    monkeypatch.setattr("medflare.flare.guard._record", Mock(side_effect=full))
    result = (
        make_reply(ReturnCode.EXECUTION_EXCEPTION, {"medflare.error": SECRET})
        if failed
        else to_shareable(update)
    )
    left = OutboundGuard().process(result, context)
    assert "disk is full" in blocked(left) and SECRET.encode() not in contents(left)


def test_results_of_other_executors_stay(update: Message) -> None:
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, SITE)
    weights = DXO(DataKind.WEIGHTS, {"w": torch.ones(2)}).to_shareable()
    assert SITE in blocked(OutboundGuard().process(weights, fl_ctx))
    assert (
        OutboundGuard().process(make_reply(ReturnCode.TASK_ABORTED), fl_ctx).get_return_code()
        == ReturnCode.TASK_ABORTED
    )


# ---- the site's own settings and filters ---------------------------------------------------------------------------------


def test_the_sites_own_limits_and_that_a_misspelt_one_is_not_taken_for_none(
    context: FLContext, spec: ParticipantSpec, update: Message
) -> None:
    def left(**outbound: Any) -> Shareable:
        spec.local_file.write_text(json.dumps({"outbound": outbound}))
        return OutboundGuard().process(to_shareable(update), context)

    assert {
        left(**allowed).get_return_code()
        for allowed in ({"entries": ["model"]}, {"bytes": update.nbytes})
    } == {ReturnCode.OK}
    assert "model" in blocked(left(entries=["selector"])) and str(update.nbytes) in blocked(
        left(bytes=update.nbytes - 1)
    )
    for misspelt in ({"entry": ["model"]}, {"bytes": "10"}):
        assert "outbound" in blocked(left(**misspelt))


# ---- values and records that went wrong ----------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_that_diverged_is_named(
    value: float, context: FLContext, spec: ParticipantSpec, update: Message
) -> None:
    update.meta["loss"] = value
    line = blocked(OutboundGuard().process(to_shareable(update), context))
    assert f"item 'loss' is {value}; if training diverges, lower the learning rate" in line
    (row,) = report(spec)
    assert row["sent"] == "no"


def test_rows_after_a_torn_line_begin_on_a_new_one(
    context: FLContext, spec: ParticipantSpec, update: Message
) -> None:
    guard = OutboundGuard()
    file = spec.folder / "outbound.csv"
    guard.process(to_shareable(update), context)
    whole = report(spec)
    file.write_bytes(file.read_bytes()[:-20])  # as a full disk or a crash leaves it
    guard.process(to_shareable(update), context)
    rows = report(spec)
    assert rows[:3] == whole[:3] and len(rows) == 8
    later = [(row["entry"], row["sent"]) for row in rows[4:]]
    assert later == [(row["entry"], row["sent"]) for row in whole]
