"""Test-time adaptation as a final model of any kind: stored and built again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.adaptation.dsbn import TargetStatistics
from medflare.adaptation.registry import adapted_at, adapted_model, with_adaptation, with_tent
from medflare.adaptation.tent import Tent, TentSettings
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.inference.deployed import load_model, plain_message, save_model
from medflare.methods.catalogue import build_deployed
from medflare.tasks.config import TaskConfig
from methods import squares


@pytest.fixture(
    params=[
        squares.SEGMENTATION,
        squares.task("classification", network={"name": "resnet18", "small_images": True}),
    ]
)
def task(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(("tta", "kind"), [("dsbn", TargetStatistics), ("tent", Tent)])
def test_stored_built_and_used(task: TaskConfig, tta: str, kind: type, tmp_path: Path) -> None:
    plain = plain_message(squares.start(task))
    message = (
        with_adaptation(plain, "dsbn")
        if tta == "dsbn"
        else with_tent(plain, task, rate=0.02, steps=2, episodic=True)
    )
    save_model(tmp_path, task, message, {})
    module = load_model(tmp_path).build(build_deployed)
    images = squares.site("O", task).data.test.images
    assert type(module) is kind
    if isinstance(module, TargetStatistics):
        module.adapt([images])
    if isinstance(module, Tent):
        size = task.batch_size
        assert module.settings == TentSettings(size, rate=0.02, steps=2, episodic=True)
        assert module.batch_size == size
    actual = module(images)
    unadapted = build_deployed(task, plain)(images)
    assert actual.shape == unadapted.shape and not torch.allclose(actual, unadapted, atol=1e-3)
    assert ((actual >= 0) & (actual <= 1)).all()


def test_dsbn_has_the_sites_statistics(task: TaskConfig, tmp_path: Path) -> None:
    plain = plain_message(squares.start(task))
    site = squares.site("O", task)
    message = adapted_at(site, plain, "dsbn", partial(build_deployed, task))
    save_model(tmp_path, task, message, {})
    expected = TargetStatistics(build_deployed(task, plain))
    images = site.data.test.images
    expected.adapt([images])
    torch.testing.assert_close(load_model(tmp_path).build(build_deployed)(images), expected(images))
    assert (
        with_tent(plain, task).states.keys()
        == with_adaptation(plain, "dsbn").states.keys()
        == {"model"}
    )
    assert plain.states.keys() == {"model"} and plain.meta["kind"] == "plain"


def test_the_adapted_model_can_be_of_any_kind() -> None:
    plain = plain_message(squares.start())
    kinds: list[str] = []

    def build(message: Message) -> torch.nn.Module:
        kinds.append(message.meta["kind"])
        return build_deployed(squares.SEGMENTATION, plain)

    assert (
        type(
            adapted_model(
                squares.SEGMENTATION,
                with_adaptation(Message(plain.states, {"kind": "odd"}), "dsbn"),
                build,
            )
        )
        is TargetStatistics
    )
    odd = with_tent(Message(plain.states, {"kind": "odder", "more": 1}), squares.SEGMENTATION)
    assert odd.meta["more"] == 1 and type(adapted_model(squares.SEGMENTATION, odd, build)) is Tent
    assert kinds == ["odd", "odder"]


def test_memo_has_a_limit_of_copies() -> None:
    task = squares.SEGMENTATION
    message = with_adaptation(plain_message(squares.start(task)), "memo,copies=65")
    with pytest.raises(ConfigError, match="copies"):
        build_deployed(task, message)
