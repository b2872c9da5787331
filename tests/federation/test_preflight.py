"""Checks before a run starts, and models that a method does not have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.phases import extends
from medflare.core.settings import strict_dataclass
from medflare.core.specs import MetaSpec, TensorSpec
from medflare.federation.local.loop import run_local
from medflare.federation.preflight import check_run
from medflare.federation.settings import RunSettings
from medflare.methods import catalogue
from medflare.methods.aggregation import WeightedMean
from medflare.methods.base import Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import MODEL, FedAvgSite, FedAvgSiteHyper
from medflare.methods.method import Method
from medflare.methods.parts.measured import VALIDATION
from medflare.tasks.config import load_task

TASK = load_task(
    {
        **load_task("phantom_grades").to_dict(),
        "size": [16, 16],
        "network": {"name": "small_cnn", "channels": [4]},
    }
)


class PersonalSite(FedAvgSite[Any]):
    """Has no global model at the end."""

    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {
            role: model for role, model in super().finalize(incoming).items() if role != "global"
        }


def personal() -> Method:
    """The method of a notebook: in no package, and another object in every cell."""
    return Method(
        "style",
        "Personal models",
        "unpublished",
        PersonalSite,
        FedAvgServer,
        roles=("personal", "deployed"),
        outside=False,
    )


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """No test hands its methods to the next."""
    yield
    catalogue._OBJECTS.clear()


def test_a_method_runs_as_an_object(tmp_path: Path) -> None:
    mine = Method("mine", "FedAvg under another name", "unpublished", FedAvgSite, FedAvgServer)
    ours = run_local(mine, TASK, 2, rounds=1, seed=0, out=tmp_path)
    theirs = run_local("fedavg", TASK, 2, rounds=1, seed=0)
    assert ours["status"] == "COMPLETED" and ours["sites"] == theirs["sites"]
    resumed = run_local(mine, TASK, 2, rounds=1, seed=0, out=tmp_path, resume=True)
    assert resumed["sites"] == ours["sites"]


def test_outside_sites_need_a_method_with_a_model_for_them() -> None:
    with pytest.raises(ConfigError, match="z"):
        run_local(personal(), TASK, 2, rounds=1, seed=0, outside=["z"])


def test_a_missing_role_is_named_at_every_site() -> None:
    results = run_local(personal(), TASK, 2, rounds=1, seed=0)
    assert results["status"] == "COMPLETED"
    for site, entry in results["sites"].items():
        assert (
            set(entry["metrics"]["global"].values()) == {None}
            and entry["metrics"]["deployed"][TASK.metric] is not None
        )
        messages = [event["message"] for event in results["events"] if event["site"] == site]
        (why,) = [message for message in messages if message.startswith("global:")]
        assert "style" in why and "did not train" not in why


# -- slips that a dry run with zeros finds before an image is read -------------------------------


@strict_dataclass
class WideHyper(FedAvgSiteHyper):
    share: float = param(2.0, "its default is not allowed", low=0, high=1)


class WideSite(FedAvgSite[WideHyper]):
    """Its hyper-parameter has a default outside its range."""


class Lost(WeightedMean):
    """Loses a tensor of the model."""

    def shared(self, models: Any, round: int, previous: Any = None) -> Any:
        mean = super().shared(models, round, previous)
        del mean["head.bias"]
        return mean


class LosingServer(FedAvgServer[Any]):
    aggregation_class = Lost


class ForgettingServer(FedAvgServer[Any]):
    """Its model loses a tensor."""

    def aggregate_models(self, step: Step, replies: Any) -> None:
        super().aggregate_models(step, replies)
        self.model = {name: self.model[name] for name in self.model if name != "head.bias"}


class HalfServer(FedAvgServer[Any]):
    """Its mean has half precision."""

    def aggregate_models(self, step: Step, replies: Any) -> None:
        super().aggregate_models(step, replies)
        self.model = {name: tensor.half() for name, tensor in self.model.items()}


class StyleServer(FedAvgServer[Any]):
    def steps(self) -> list[Step]:
        return [Step("styles", 0), *super().steps()]


class DeafServer(FedAvgServer[Any]):
    """Reads what the site does not send."""

    def aggregate_models(self, step: Step, replies: Any) -> None:
        for reply in replies.values():
            reply[TensorSpec("styles")]


class ShapeServer(FedAvgServer[Any]):
    """Sends the shapes of a network without its weights."""

    def configure_final(self, site: str) -> Message:
        return Message.of({MODEL: self.context.plan.template()})


class IdleServer(FedAvgServer[Any]):
    def steps(self) -> list[Step]:  # type: ignore[return]
        super().steps()


class SilentServer(FedAvgServer[Any]):
    def configure_final(self, site: str) -> Message:
        return Message()


class MisspeltSite(FedAvgSite[Any]):
    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {"global": incoming, "deployd": incoming}


class MoreModelsSite(FedAvgSite[Any]):
    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {**super().finalize(incoming), "personnal": incoming}


class NamelessSite(FedAvgSite[Any]):
    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {"deployed": self.nothing}  # type: ignore[attr-defined]


class DividingServer(FedAvgServer[Any]):
    def aggregate_models(self, step: Step, replies: Any) -> None:
        torch.zeros(1, 0 // int(not replies))


class UnknownKeyServer(FedAvgServer[Any]):
    def aggregate_models(self, step: Step, replies: Any) -> None:
        {"head": 1}["head.bias"]  # not the reply's


class ForgetfulSite(FedAvgSite[Any]):
    def finalize(self, incoming: Message) -> dict[str, Message]:  # type: ignore[return]
        super().finalize(incoming)


class StateSite(FedAvgSite[Any]):
    """Its final models are states."""

    def finalize(self, incoming: Message) -> dict[str, Any]:
        return dict.fromkeys(("global", "personal", "deployed"), incoming[MODEL])


class ForgetfulServer(FedAvgServer[Any]):
    def configure_final(self, site: str) -> Message:  # type: ignore[return]
        super().configure_final(site)


class UndeclaredSite(FedAvgSite[Any]):
    """Its last phase declares no message."""

    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {}


del UndeclaredSite.phases["finalize"]


@pytest.mark.parametrize(
    ("site", "server", "named"),
    [
        (FedAvgSite, LosingServer, "Lost lost 'head.bias'"),
        (FedAvgSite, HalfServer, "float16"),
        (FedAvgSite, ForgettingServer, "work on 'train' loses 'head.bias' of its 'model'"),
        (WideSite, FedAvgServer, "site algorithm: share: Input should be less than .* 1, got 2"),
        (FedAvgSite, StyleServer, "no phase 'styles'"),
        (FedAvgSite, DeafServer, "needs 'styles'"),
        (FedAvgSite, IdleServer, r"its steps\(\) returns None; return a list with a Step"),
        (FedAvgSite, SilentServer, "final models: missing entry 'model'"),
        (FedAvgSite, ShapeServer, "final models: model/.* is not a .* in memory .*, meta, "),
        (UndeclaredSite, FedAvgServer, "final models: unexpected entry 'model'"),
        (UndeclaredSite, SilentServer, "no model 'deployed', it makes none"),
        (
            ForgetfulSite,
            FedAvgServer,
            "its finalize returns a NoneType; return a dict of role to Message",
        ),
        (StateSite, FedAvgServer, "finalize makes 'global' a dict; make it by trained_model"),
        (
            FedAvgSite,
            ForgetfulServer,
            "message with the final models: it is a NoneType; return a Message",
        ),
        (MisspeltSite, FedAvgServer, "no model 'deployed', it makes global, deployd"),
        (MoreModelsSite, FedAvgServer, "a model 'personnal', its roles are global, personal, dep"),
        (NamelessSite, FedAvgServer, r"'slip' fails in .* AttributeError.* in finalize\)"),
        (FedAvgSite, DividingServer, r"ZeroDivisionError: .*test_preflight.py, line \d+, in aggr"),
        (
            FedAvgSite,
            UnknownKeyServer,
            r"KeyError: 'head.bias' .*test_preflight.py, line \d+, in ag",
        ),
    ],
)
def test_a_slip_is_named_before_an_image_is_read(site: Any, server: Any, named: str) -> None:
    method = Method("slip", "A method with a slip", "unpublished", site, server)

    def opener(*arguments: Any) -> Any:
        raise AssertionError("an image was read")

    with pytest.raises(ConfigError, match=named):
        run_local(method, TASK, 2, rounds=1, seed=0, opener=opener)


class MetricServer(FedAvgServer[Any]):
    """Reads the metric that every reply of FedAvg's site algorithm holds."""

    def aggregate_models(self, step: Step, replies: Any) -> None:
        assert {reply[VALIDATION]["global"] for reply in replies.values()} == {None}
        super().aggregate_models(step, replies)


def test_replies_of_zeros_have_a_metric_of_every_model() -> None:
    method = Method("reader", "Reads metrics", "unpublished", FedAvgSite, MetricServer)
    check_run(method, TASK, {}, RunSettings(rounds=2, seed=0))


class LateStyleServer(FedAvgServer[Any]):
    def steps(self) -> list[Step]:
        styles = [Step("styles", round) for round in range(2, self.context.rounds)]
        return [*super().steps(), *styles]


def test_a_slip_in_a_later_round_is_named() -> None:
    method = Method("slip", "A method with a slip", "unpublished", FedAvgSite, LateStyleServer)
    check_run(method, TASK, {}, RunSettings(rounds=2, seed=0))
    with pytest.raises(ConfigError, match="no phase 'styles'"):
        check_run(method, TASK, {}, RunSettings(rounds=3, seed=0))


def test_hyper_parameters_without_their_decorator_are_refused() -> None:
    class Bare(FedAvgSiteHyper):
        share: float = param(0.5, "a share")

    class Plain(FedAvgSiteHyper):
        share: float = 0.5

    with pytest.raises(ConfigError, match="hyper-parameters Plain: put @strict_dataclass above"):

        class PlainSite(FedAvgSite[Plain]):
            pass

    with pytest.raises(ConfigError, match="hyper-parameters Bare: put @strict_dataclass above it"):

        class BareSite(FedAvgSite[Bare]):
            pass


def test_a_tensor_in_metadata_is_named() -> None:
    style = MetaSpec[Any]("style", "channel means")

    class TensorSite(FedAvgSite[Any]):
        @extends(meta=(style,))
        def train(self, round: int, incoming: Message) -> Message:
            reply = super().train(round, incoming)
            reply[style] = torch.zeros(3)
            return reply

    method = Method("tensors", "A method with a slip", "unpublished", TensorSite, FedAvgServer)
    results = run_local(method, TASK, 2, rounds=1, seed=0)
    assert results["status"] == "FAILED" and "item 'style'" in results["reason"]
