import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.forked_trial import fork_trials
from medflare.core.errors import ConfigError, StateError
from medflare.core.message import Message
from medflare.inference.deployed import (
    build,
    load_model,
    network_with,
    plain_message,
    save_model,
    with_checksum,
)
from medflare.methods.catalogue import build_deployed
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import load_task

TASK = load_task("phantom")


@pytest.fixture
def message() -> Message:
    return plain_message(initial_network(TASK, seed=3).state_dict(), selected_round=7)


@pytest.fixture
def delivered(tmp_path: Path, message: Message) -> Path:
    """The folder of a delivered model."""
    save_model(
        tmp_path, TASK, message, {"method": "fedavg", "metrics": {"dice": 1 / 3, "hd95": None}}
    )
    return tmp_path


@pytest.fixture
def card(delivered: Path) -> dict[str, Any]:
    """Its card as it was written."""
    content: dict[str, Any] = json.loads((delivered / "card.json").read_text())
    return content


def refused(
    folder: Path,
    named: str,
    card: object = None,
    error: type[Exception] = StateError,
    unsigned: bool = False,
) -> None:
    """A delivered model, with another card if one is given, is not loaded."""
    if card is not None:
        (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(error, match=named):
        load_model(folder, unsigned=unsigned)


def test_a_stored_model_is_the_delivered_one(tmp_path: Path, message: Message) -> None:
    save_model(
        tmp_path / "model",
        TASK,
        message,
        {"method": "fedavg", "site": "A", "metrics": {"dice": 0.5, "hd95": None}},
    )
    stored = load_model(tmp_path / "model")
    assert (
        stored.task == TASK
        and stored.kind == "plain"
        and stored.message.meta["selected_round"] == 7
    )
    network = initial_network(TASK, seed=3).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(stored.build()(images), network(images).sigmoid())
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "model.safetensors",
        "card.json",
    }
    card = json.loads((tmp_path / "model/card.json").read_text())
    assert (
        card["schema"] == 1
        and card["method"] == "fedavg"
        and card["fingerprint"] == TASK.fingerprint()
        and card["versions"]["torch"]
    )


def test_a_wrong_folder_is_answered_with_one_that_holds_a_model(
    tmp_path: Path, message: Message
) -> None:
    folder = tmp_path / "runs" / "fedavg-lung-seed0" / "models" / "global"
    save_model(folder, TASK, message, {"method": "fedavg"})
    for wrong, problem in (
        (tmp_path / "runs" / "fedavg-Lung-seed0" / "models", "there is no such folder"),
        (tmp_path / "runs" / "fedavg-lung-seed0", "no delivered model here"),
        (tmp_path / "runs" / "fedavg-lung-seed0", r"holds model\.safetensors and card\.json"),
    ):
        with pytest.raises(StateError, match=f"{problem}.*for example {folder}"):
            load_model(wrong)


def test_other_kinds_are_built_by_the_given_builder(tmp_path: Path) -> None:
    save_model(
        tmp_path, TASK, Message({"scale": {"by": torch.tensor(2.0)}}, {"kind": "doubled"}), {}
    )
    stored = load_model(tmp_path)
    built = stored.build(lambda task, message: nn.PReLU(init=message.states["scale"]["by"].item()))
    assert torch.equal(built(-torch.ones(2)), torch.full((2,), -2.0))
    with pytest.raises(ConfigError, match="doubled"):
        stored.build()
    with pytest.raises(StateError, match="model"):
        build(TASK, Message(stored.message.states, {"kind": "plain"}))


def test_a_builder_without_a_module_is_named() -> None:
    def builder(kind: str) -> Any:
        return lambda task, message: None

    with pytest.raises(StateError, match=r"kind 'mine' .* its builder returns NoneType"):
        build(TASK, Message({}, {"kind": "mine"}), builder)


def test_weights_of_another_network_are_refused_by_name(message: Message) -> None:
    state = message.states["model"]
    name = next(iter(state))
    with pytest.raises(StateError, match=name.replace(".", r"\.")):
        network_with(TASK, {key: tensor for key, tensor in state.items() if key != name})
    with pytest.raises(StateError, match="shape"):
        network_with(TASK, {**state, name: torch.zeros(1)})


def _damage(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


def _swap_weights(folder: Path, message: Message) -> None:
    other = {name: tensor + 1 for name, tensor in message.states["model"].items()}
    save_model(folder / "other", TASK, plain_message(other), {})
    (folder / "other" / "model.safetensors").replace(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder, message: (folder / "card.json").unlink(), "card"),
        (lambda folder, message: (folder / "model.safetensors").unlink(), "model"),
        (lambda folder, message: (folder / "card.json").write_text("{"), "card"),
        (lambda folder, message: (folder / "card.json").write_text("[]"), "card"),
        # A pickle.
        (
            lambda folder, message: (folder / "model.safetensors").write_bytes(
                b"\x80\x04cposix\nsystem\n."
            ),
            "model",
        ),
        (lambda folder, message: _damage(folder, "model.safetensors"), "model"),
        (lambda folder, message: _swap_weights(folder, message), "model"),
    ],
)
def test_damaged_folders_are_refused(
    delivered: Path, message: Message, spoil: Any, named: str
) -> None:
    spoil(delivered, message)
    refused(delivered, named)


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"later_setting": 1}, StateError, "later_setting"),
        ({"size": [60_000, 60_000]}, ConfigError, "--max-pixels"),
        ({"intensity": {"name": "GaussianSmooth", "sigma": 1e9}}, ConfigError, "GaussianSmooth"),
    ],
    ids=["of a later medflare", "images beyond the bounds", "a transform beyond any memory"],
)
def test_a_signed_card_with_an_unusable_task_is_refused(
    delivered: Path,
    card: dict[str, Any],
    settings: dict[str, Any],
    error: type[Exception],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_trials(monkeypatch)
    refused(delivered, named, with_checksum({**card, "task": {**card["task"], **settings}}), error)


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ["cup", "disc"]},
        {"metrics": {"dice": 0.99}},
        {"approved": "by all"},
        {"task": {}},
        {"signature": "0" * 64},
    ],
)
def test_a_card_that_was_changed_is_refused(
    delivered: Path, card: dict[str, Any], change: dict[str, Any]
) -> None:
    (delivered / "card.json").write_text(json.dumps(card))
    load_model(delivered)  # written otherwise, and the same
    refused(delivered, "signature", {**card, **change})


def test_a_card_without_signature_is_refused_unless_it_is_allowed(
    delivered: Path, card: dict[str, Any]
) -> None:
    del card["signature"]
    refused(delivered, "--unsigned", card)
    assert load_model(delivered, unsigned=True).kind == "plain"
    refused(delivered, "signature", {**card, "signature": None}, unsigned=True)


@pytest.mark.parametrize("depth", [600, 100_000])
def test_a_deeply_nested_card_is_refused(delivered: Path, depth: int) -> None:
    text = (delivered / "card.json").read_text().rstrip().removesuffix("}")
    (delivered / "card.json").write_text(f'{text}, "more": {"[" * depth}{"]" * depth}}}')
    refused(delivered, "card")


def test_texts_of_a_card_are_printable(tmp_path: Path, message: Message) -> None:
    save_model(tmp_path, TASK, message, {"method": "fedavg\x1b[2J", "site": "A\u202eB"})
    assert (
        load_model(tmp_path).card["method"] == "fedavg\\x1b[2J"
        and load_model(tmp_path).card["site"] == "A\\u202eB"
    )


def test_a_model_whose_kind_is_no_text_is_refused(tmp_path: Path, message: Message) -> None:
    save_model(tmp_path, TASK, Message(message.states, {"kind": ["plain"]}), {})
    refused(tmp_path, r"model\.safetensors: names no kind")


@pytest.mark.parametrize(
    "meta",
    [
        {"kind": ["plain"]},
        {"kind": "tent"},
        {"kind": "tent", "base": ["plain"]},
        {"kind": "tent", "base": "tent"},
        {"kind": "memo", "base": "plain", "memo": [1]},
        {"kind": "super", "sites": 3},
        {"kind": "routed"},
    ],
)
def test_a_model_with_crafted_content_is_refused_in_one_line(
    message: Message, meta: dict[str, Any]
) -> None:
    with pytest.raises((ConfigError, StateError)) as refusal:
        build_deployed(TASK, Message(message.states, meta))
    assert "\n" not in str(refusal.value)
