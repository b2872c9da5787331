"""Checks before a run starts, and models that a method does not have."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.core.manifest import Phase, TensorSpec
from medflare.core.message import Message
from medflare.federation.local.loop import run_local
from medflare.federation.preflight import check_run
from medflare.inference.deployed import plain_message
from medflare.methods import catalogue
from medflare.methods.base import MEASURED, ServerAlgorithm, SiteAlgorithm, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import FedAvgSite
from medflare.methods.method import Method, paired
from medflare.tasks.config import load_task

TASK = load_task({**load_task("phantom_grades").to_dict(), "size": [16, 16], "network": {"name": "small_cnn", "channels": [4]}})
STYLE = TensorSpec("style", "mean intensity of the training images", lambda plan: {"mean": torch.empty(1, device="meta")})


class StyleSite(SiteAlgorithm[Any]):
    """Shares a mean intensity and keeps its network to itself: there is no global model."""

    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", request=(STYLE,), reply=(STYLE,), reply_meta=MEASURED),
        Phase("validate", request=(STYLE,), reply_meta=MEASURED),
    )

    def train(self, round: int, incoming: Message) -> Message:
        mean = torch.stack([batch.images.mean() for batch in self.site.ordered("train")]).mean()
        return Message({"style": {"mean": mean[None]}}, self.meta(validation={}))

    def validate(self, round: int, incoming: Message) -> Message:
        return Message({}, self.meta(validation={}))

    def finalize(self, incoming: Message) -> dict[str, Message]:
        if not self.inside:
            return {}
        model = plain_message(self.site.network().state_dict())
        return {"personal": model, "deployed": model}


class StyleServer(ServerAlgorithm[Any]):
    """Averages the intensities."""

    mean = torch.zeros(1)

    def configure(self, step: Step, site: str) -> Message:
        return Message({"style": {"mean": self.mean}})

    def aggregate(self, step: Step, replies: Any) -> None:
        if step.phase == "train":
            self.mean = torch.stack([reply.states["style"]["mean"] for reply in replies.values()]).mean(dim=0)

    def configure_final(self, site: str) -> Message:
        return Message()


def style(**declared: Any) -> Method:
    """The method of a notebook: in no package, and another object in every cell."""
    return Method("style", "Shared intensities", "unpublished", StyleSite, StyleServer, **declared)


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """No test hands its methods to the next."""
    yield
    catalogue._OBJECTS.clear()


def events(results: dict[str, Any], site: str, role: str) -> list[str]:
    return [event["message"] for event in results["events"] if event.get("site") == site and event["message"].startswith(f"{role}:")]


def test_a_method_runs_as_an_object(tmp_path: Path) -> None:
    mine = Method("mine", "FedAvg under another name", "unpublished", FedAvgSite, FedAvgServer)
    ours = run_local(mine, TASK, 2, rounds=1, seed=0, out=tmp_path)
    theirs = run_local("fedavg", TASK, 2, rounds=1, seed=0)
    assert ours["status"] == "COMPLETED" and ours["sites"] == theirs["sites"]
    resumed = run_local(mine, TASK, 2, rounds=1, seed=0, out=tmp_path, resume=True)
    assert resumed["sites"] == ours["sites"]


def test_outside_sites_need_a_method_with_a_model_for_them() -> None:
    method = style(roles=("personal", "deployed"), outside=False)
    with pytest.raises(ConfigError, match="z"):
        run_local(method, TASK, 2, rounds=1, seed=0, outside=["z"])
    assert run_local(method, TASK, 2, rounds=1, seed=0)["status"] == "COMPLETED"


def test_a_missing_role_is_named_at_every_site() -> None:
    results = run_local(style(roles=("personal", "deployed"), outside=False), TASK, 2, rounds=1, seed=0)
    for site, entry in results["sites"].items():
        assert set(entry["metrics"]["global"].values()) == {None} and entry["metrics"]["deployed"][TASK.metric] is not None
        (why,) = events(results, site, "global")
        assert "style" in why and "did not train" not in why


def test_algorithms_whose_messages_do_not_match_raise() -> None:
    fedavg = catalogue.get_method("fedavg")
    for pair, entry in ((paired(style(), fedavg), "style"), (paired(fedavg, style()), "model")):
        with pytest.raises(ConfigError, match=entry):
            check_run(pair, TASK, {}, rounds=1)
    check_run(paired(fedavg, catalogue.get_method("sha")), TASK, {}, rounds=1)
