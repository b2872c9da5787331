"""The outbound guard: what the manifest and the site allow leaves, and nothing else; FLARE's privacy filters in front of it."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.federation.screening.rounding import Rounding
from medflare.federation.settings import FACTS_LIMIT
from medflare.flare.exchange.participants import SITE_TASK, ParticipantSpec, SiteTask
from medflare.flare.exchange.wire import error_of, to_message, to_shareable
from medflare.flare.guard import OutboundGuard, own_limits, planned
from medflare.flare.privacy import UpdatePrivacy
from medflare.methods.catalogue import get_method
from medflare.tasks.config import load_task

SITE = "clinic"


@pytest.fixture
def task() -> Any:
    return load_task({**load_task("phantom").to_dict(), "network": {"name": "unet", "channels": [4, 8], "norm": "batch"}})


@pytest.fixture
def spec(tmp_path: Path, task: Any) -> ParticipantSpec:
    (tmp_path / "task.json").write_text(json.dumps(task.to_dict()))
    StateStore(tmp_path / "medflare" / "state").save("membership", Message({}, {"site": SITE, "sites": [SITE, "other"], "role": "inside"}))
    task_file, local_file, folder = (str(tmp_path / name) for name in ("task.json", "medflare.json", "medflare"))
    return ParticipantSpec(SITE, "fedavg", "", 0, task_file, local_file, folder)


@pytest.fixture
def context(spec: ParticipantSpec) -> FLContext:
    return prepared(spec, Message())


def prepared(spec: ParticipantSpec, incoming: Message) -> FLContext:
    """FLARE's context while the site answers to "train" of round 4."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, SITE)
    fl_ctx.set_prop(SITE_TASK, SiteTask("train", 4, to_shareable(incoming), spec), private=True, sticky=False)
    return fl_ctx


@pytest.fixture
def update(task: Any) -> Message:
    """What FedAvg's site half sends: real tensors for the manifest's shapes."""
    template = get_method("fedavg").plan(task, (SITE, "other"), {}).template()
    model = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in template.items()}
    return Message({"model": model}, {"n_samples": 12, "loss": 0.5, "validation": {"global": 0.7}})


def kept_back(result: Shareable) -> str:
    """The one line that is sent instead; fails if any data are."""
    assert "DXO" not in result and "FL_MODEL" not in result
    with pytest.raises(Exception, match="not a medflare message"):
        to_message(result)
    return error_of(result) or ""


def report(spec: ParticipantSpec) -> list[dict[str, str]]:
    with (Path(spec.folder) / "outbound.csv").open() as file:
        return list(csv.DictReader(file))


def test_what_is_declared_leaves_and_is_reported(context: FLContext, spec: ParticipantSpec, update: Message) -> None:
    sent = to_shareable(update)
    assert OutboundGuard().process(sent, context) is sent
    model, facts = report(spec)
    assert (model["phase"], model["round"], model["entry"], model["sent"]) == ("train", "4", "model", "yes")
    assert int(model["bytes"]) == update.nbytes and int(model["tensors"]) == len(update.states["model"])
    assert "weighted mean" in model["purpose"]
    assert (facts["entry"], facts["purpose"]) == ("facts", "loss, n_samples, validation")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.states.update(images={"scan": torch.ones(3)}), "unexpected entry 'images'"),
        (lambda m: m.states["model"].update(patient=torch.ones(3)), "unexpected tensor 'patient'"),
        (lambda m: m.states["model"].popitem(), "missing tensor"),
        (lambda m: m.states["model"].update({next(iter(m.states["model"])): torch.ones(2)}), "has shape (2,)"),
        (lambda m: m.facts.update(pixels=list(range(FACTS_LIMIT))), "bytes of facts, more than"),
        (lambda m: m.facts.update(pixels=torch.ones(3)), "neither number nor text"),
    ],
)
def test_everything_else_stays(context: FLContext, spec: ParticipantSpec, update: Message, spoil: Any, words: str) -> None:
    spoil(update)
    line = kept_back(OutboundGuard().process(to_shareable(update), context))
    assert words in line and f"the outbound guard of site {SITE} kept back the answer to 'train'" in line
    (row,) = report(spec)
    assert row["sent"] == "no" and words in row["purpose"]


def test_a_report_that_a_full_disk_left_empty_begins_with_its_columns(context: FLContext, spec: ParticipantSpec, update: Message) -> None:
    path = Path(spec.folder) / "outbound.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    for _ in range(2):
        OutboundGuard().process(to_shareable(update), context)
    assert [row["sent"] for row in report(spec)] == ["yes"] * 4


def rounded(spec: ParticipantSpec, update: Message) -> tuple[Message, Message]:
    """(what the server sends of weights that are 0.5 smaller than the site's, what the site answers), with weights rounded."""
    plan = get_method("fedavg").plan(load_task(Path(spec.task_file)), (SITE, "other"), {})
    rounding, train = Rounding(plan), get_method("fedavg").site_class.phase("train")
    weights = {name: tensor - 0.5 if tensor.is_floating_point() else tensor for name, tensor in update.states["model"].items()}
    incoming = rounding.down(train, Message({"model": weights}), {})
    return incoming, rounding.up(train, update, rounding.widened(incoming))


def test_the_wire_of_the_run_is_part_of_what_is_declared(spec: ParticipantSpec, update: Message) -> None:
    """Rounded where the server sends it so, and then nothing else; the report has the bytes that leave."""
    incoming, reply = rounded(spec, update)
    sent = to_shareable(reply)
    assert OutboundGuard().process(sent, prepared(spec, incoming)) is sent
    model, _ = report(spec)
    assert int(model["bytes"]) == reply.nbytes < 0.6 * update.nbytes
    assert "expected torch.bfloat16" in kept_back(OutboundGuard().process(to_shareable(update), prepared(spec, incoming)))
    assert "expected torch.float32" in kept_back(OutboundGuard().process(sent, prepared(spec, Message(update.states))))


def test_a_fingerprint_leaves_as_facts_alone(spec: ParticipantSpec) -> None:
    survey = replace(spec, method="fingerprint")
    fl_ctx = prepared(survey, Message())
    fl_ctx.set_prop(SITE_TASK, SiteTask("describe", 0, to_shareable(Message()), survey), private=True, sticky=False)
    sent = to_shareable(Message({}, {"fingerprint": {"images": 3}}))
    assert OutboundGuard().process(sent, fl_ctx) is sent
    (row,) = report(survey)
    assert (row["phase"], row["entry"], row["purpose"], row["sent"]) == ("describe", "facts", "fingerprint", "yes")
    extra = to_shareable(Message({"scan": {"x": torch.ones(3)}}, {"fingerprint": {}}))
    assert "unexpected entry 'scan'" in kept_back(OutboundGuard().process(extra, fl_ctx))


def test_headers_carry_no_data(context: FLContext, update: Message) -> None:
    shareable = to_shareable(update)
    shareable.set_header("notes", torch.ones(4))
    assert "headers carry no data" in kept_back(OutboundGuard().process(shareable, context))


def test_what_the_site_works_by_is_read_once_in_a_job(
    context: FLContext, spec: ParticipantSpec, update: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the weights that a task starts from, which may be gigabytes. Who enrols anew may do so among other sites."""
    read: list[ParticipantSpec] = []

    def noted(found: ParticipantSpec) -> object:
        read.append(found)
        return planned(found)

    monkeypatch.setattr("medflare.flare.guard.planned", noted)
    guard = OutboundGuard()
    for _ in range(3):
        assert guard.process(to_shareable(update), context).get_return_code() == ReturnCode.OK
    assert read == [spec]
    context.set_prop(SITE_TASK, SiteTask("enrol", 0, to_shareable(Message()), spec), private=True, sticky=False)
    guard.process(to_shareable(Message({}, {"n": {"train": 3}})), context)
    other = replace(spec, method="fedprox")
    for one in (spec, other, other):
        guard.process(to_shareable(update), prepared(one, Message()))
    assert read == [spec, spec, other]


def test_a_failed_task_sends_its_line_and_nothing_else(context: FLContext, update: Message) -> None:
    failed = to_shareable(update)
    failed.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    failed.set_header("medflare.error", "no images")
    result = OutboundGuard().process(failed, context)
    assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert kept_back(result) == "no images"


def test_results_of_other_executors_stay(update: Message) -> None:
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, SITE)
    weights = DXO(DataKind.WEIGHTS, {"w": torch.ones(2)}).to_shareable()
    assert "medflare's methods only" in kept_back(OutboundGuard().process(weights, fl_ctx))
    assert OutboundGuard().process(make_reply(ReturnCode.TASK_ABORTED), fl_ctx).get_return_code() == ReturnCode.TASK_ABORTED


class TestTheSitesOwnList:
    def test_entries(self, context: FLContext, spec: ParticipantSpec, update: Message) -> None:
        Path(spec.local_file).write_text('{"outbound": {"entries": ["selector"]}}')
        assert "model is not among the entries" in kept_back(OutboundGuard().process(to_shareable(update), context))
        Path(spec.local_file).write_text('{"outbound": {"entries": ["model"]}}')
        assert OutboundGuard().process(to_shareable(update), context).get_return_code() == ReturnCode.OK

    def test_bytes(self, context: FLContext, spec: ParticipantSpec, update: Message) -> None:
        Path(spec.local_file).write_text(json.dumps({"outbound": {"bytes": update.nbytes - 1}}))
        assert f"{update.nbytes} bytes of tensors, local/medflare.json allows" in kept_back(
            OutboundGuard().process(to_shareable(update), context)
        )
        Path(spec.local_file).write_text(json.dumps({"outbound": {"bytes": update.nbytes}}))
        assert OutboundGuard().process(to_shareable(update), context).get_return_code() == ReturnCode.OK

    @pytest.mark.parametrize("outbound", [["model"], {"entry": ["model"]}, {"bytes": "10"}, {"bytes": True}, {"entries": "model"}])
    def test_a_misspelt_limit_is_not_taken_for_none(
        self, context: FLContext, spec: ParticipantSpec, update: Message, outbound: Any
    ) -> None:
        Path(spec.local_file).write_text(json.dumps({"outbound": outbound}))
        with pytest.raises(ConfigError, match="outbound"):
            own_limits(Path(spec.local_file))
        assert "outbound" in kept_back(OutboundGuard().process(to_shareable(update), context))


class TestPrivacyFiltersOfFlare:
    """They look at every DXO of the collection, so that nothing which holds tensors escapes them."""

    def test_percentile_privacy_on_whole_models_is_why_update_privacy_exists(self, context: FLContext, update: Message) -> None:
        """FLARE's filter reaches the tensors, and clips the weights themselves: what is left is no model."""
        filtered = to_message(PercentilePrivacy(percentile=0, gamma=0.01).process(to_shareable(update), context))
        floats = [tensor for tensor in filtered.states["model"].values() if torch.as_tensor(tensor).ndim]
        assert floats and all(torch.as_tensor(tensor).abs().max() <= 0.01 for tensor in floats)

    def test_update_privacy_clips_the_change(self, spec: ParticipantSpec, update: Message) -> None:
        incoming = {name: tensor - 0.5 if tensor.is_floating_point() else tensor for name, tensor in update.states["model"].items()}
        context = prepared(spec, Message({"model": incoming}))
        sent = UpdatePrivacy("percentile", {"percentile": 0, "gamma": 0.25}).process(to_shareable(update), context)
        for name, tensor in to_message(sent).states["model"].items():
            expected = incoming[name] + 0.25 if tensor.is_floating_point() else incoming[name]
            torch.testing.assert_close(tensor, expected)
        assert OutboundGuard().process(sent, context).get_return_code() == ReturnCode.OK, "shapes and dtypes are the declared ones"

    def test_rounded_updates_are_filtered_as_the_changes_that_they_are(self, spec: ParticipantSpec, update: Message) -> None:
        incoming, reply = rounded(spec, update)
        context = prepared(spec, incoming)
        sent = UpdatePrivacy("percentile", {"percentile": 0, "gamma": 0.25}).process(to_shareable(reply), context)
        for name, tensor in to_message(sent).states["model"].items():
            assert tensor.dtype == reply.states["model"][name].dtype
            if tensor.dtype == torch.bfloat16:
                assert torch.equal(tensor, torch.full_like(tensor, 0.25)), "of a change of 0.5"
        assert OutboundGuard().process(sent, context).get_return_code() == ReturnCode.OK

    def test_svt_sends_part_of_the_change(self, spec: ParticipantSpec, update: Message) -> None:
        incoming = {name: tensor - 0.5 if tensor.is_floating_point() else tensor for name, tensor in update.states["model"].items()}
        context = prepared(spec, Message({"model": incoming}))
        sent = UpdatePrivacy("svt", {"fraction": 0.3, "epsilon": 10.0, "gamma": 1.0, "tau": 0.1, "replace": False}).process(
            to_shareable(update), context
        )
        weights = [(tensor, incoming[name]) for name, tensor in to_message(sent).states["model"].items() if tensor.is_floating_point()]
        changed = sum(int((tensor != before).sum()) for tensor, before in weights) / sum(tensor.numel() for tensor, _ in weights)
        assert 0.2 < changed < 0.4
        assert OutboundGuard().process(sent, context).get_return_code() == ReturnCode.OK

    def test_what_cannot_be_protected_is_not_sent(self, context: FLContext, update: Message) -> None:
        kept = UpdatePrivacy("percentile").process(to_shareable(update), context)
        assert "model did not come in with the task, so it has no change to filter" in kept_back(kept)

    def test_unknown_filters_and_options_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="no privacy filter 'laplace'"):
            UpdatePrivacy("laplace")
        with pytest.raises(ConfigError, match="percentile"):
            UpdatePrivacy("percentile", {"gama": 0.1})
        with pytest.raises(ConfigError, match=r"tau = 0.1 is not below gamma"):
            UpdatePrivacy("svt", {"tau": 0.1})

    def test_exclude_vars_reaches_the_tensors_and_the_guard_says_what_is_missing(self, context: FLContext, update: Message) -> None:
        context.set_prop(FLContextKey.CURRENT_JOB_ID, "job")
        name = next(iter(update.states["model"]))
        filtered = ExcludeVars(exclude_vars=[name]).process(to_shareable(update), context)
        assert name not in to_message(filtered).states["model"] or not to_message(filtered).states["model"][name].any()
        assert f"missing tensor '{name}'" in kept_back(OutboundGuard().process(filtered, context))
