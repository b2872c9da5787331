"""Initial weights: found, checked by their SHA-256, read without running code, fitted to the network."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.inference.deployed import plain_message, save_model
from medflare.networks.catalogue import initial_network
from medflare.networks.weights import PACKAGE, WEIGHTS_VARIABLE, starting_state
from medflare.tasks.config import TaskConfig
from methods.squares import equal

NETWORK: dict[str, Any] = {
    "name": "SegResNet",
    "init_filters": 8,
    "blocks_down": [1, 1],
    "blocks_up": [1],
}
RESNET: dict[str, Any] = {"name": "resnet18"}
PICTURES: dict[str, Any] = {"size": [32, 32], "channels": 3}


def task_with(
    path: Path,
    format: str,
    part: str = "all",
    network: dict[str, Any] = NETWORK,
    kind: str = "segmentation",
    **changes: Any,
) -> TaskConfig:
    """A task with the file as it is now."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "0" * 64
    weights = {"file": path.name, "sha256": digest, "format": format, "part": part}
    return small_task(kind, network={**network, "weights": weights}, **changes)


def other_state() -> dict[str, torch.Tensor]:
    """Weights of the network that no seed 0 draws."""
    return initial_network(small_task(network=NETWORK), 9).state_dict()


def own_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same under MONAI's names."""
    return {
        ("conv_final.2.conv." + name[5:] if name.startswith("head.") else name[5:]): tensor
        for name, tensor in state.items()
    }


def refused(named: str, path: Path, *file: Any, **changes: Any) -> None:
    """Weights that the task of `task_with` cannot start from."""
    with pytest.raises(ConfigError, match=named):
        starting_state(task_with(path, *file, **changes), 0, path)


@pytest.mark.parametrize("format", ["safetensors", "torch", "medflare", "torchvision"])
def test_every_format(tmp_path: Path, format: str) -> None:
    state = other_state()
    path = tmp_path / "weights.bin"
    if format == "medflare":
        save_model(tmp_path / "model", small_task(network=NETWORK), plain_message(state), {})
        path = tmp_path / "model" / "model.safetensors"
    elif format == "safetensors":
        save_file(own_names(state), path)
    elif format == "torch":
        torch.save({"state_dict": own_names(state)}, path)
    else:  # other names, the same order
        torch.save({f"layer{number}": tensor for number, tensor in enumerate(state.values())}, path)
    actual = starting_state(task_with(path, format), 0, path)
    assert actual is not None and equal(actual, state)
    in_folder = starting_state(task_with(path, format), 0, path.parent)
    assert in_folder is not None and equal(in_folder, state)
    body = starting_state(task_with(path, format, "body"), 0, path)
    random = initial_network(small_task(network=NETWORK), 0).state_dict()
    assert body is not None
    for name in body:
        assert torch.equal(body[name], (random if name.startswith("head.") else state)[name])


def test_a_body_goes_with_another_number_of_outputs(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(own_names(other_state()), path)
    three: dict[str, Any] = {"target": "multiclass", "labels": ["a", "b", "c"]}
    actual = starting_state(task_with(path, "safetensors", "body", **three), 0, path)
    assert actual is not None and len(actual["head.bias"]) == 3
    refused("SegResNet", path, "safetensors", **three)


def test_the_file_is_found_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starting_state(small_task(), 0) is None, "a task without weights"
    path = tmp_path / "weights.safetensors"
    save_file(own_names(other_state()), path)
    task = task_with(path, "safetensors")
    with pytest.raises(ConfigError, match="weights"):
        starting_state(task, 0)
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path))
    assert starting_state(task, 0) is not None


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_a_pickle_is_refused_by_name_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Evil()))
    torch.save({"weights": Evil()}, tmp_path / "torch.pth")
    for name in ("plain.pkl", "torch.pth"):
        for format in ("torch", "torchvision"):
            refused(name, tmp_path / name, format)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    bad = tmp_path / "bad"
    save_file(own_names(other_state()), good)
    task = task_with(good, "safetensors")
    save_file(own_names(initial_network(small_task(network=NETWORK), 4).state_dict()), good)
    with pytest.raises(ConfigError, match="sha256"):
        starting_state(task, 0, good)
    bad.write_bytes(b"nothing")
    for format in ("safetensors", "medflare"):
        refused("bad", bad, format)
    torch.save([1, 2], bad)
    refused("bad", bad, "torch")
    save_file({**own_names(other_state()), "more": torch.zeros(1)}, bad)
    refused("more", bad, "safetensors")
    broken = own_names(other_state())
    broken["conv_final.2.conv.bias"][0] = torch.nan
    save_file(broken, bad)
    refused(r"head\.bias", bad, "safetensors")
    save_model(
        tmp_path / "two",
        small_task(),
        Message({"model": other_state(), "b": other_state()}, {"kind": "super"}),
        {},
    )
    with pytest.raises(ConfigError, match="super"):
        starting_state(
            task_with(tmp_path / "two" / "model.safetensors", "medflare"), 0, tmp_path / "two"
        )


def test_layers_of_torchvision_are_matched_by_their_order(tmp_path: Path) -> None:
    """ResNet-18 as torchvision names it: the same layers as MONAI's, old files without the counters of batch normalisation."""
    task = small_task("classification", network=RESNET, **PICTURES)
    state = initial_network(task, 5).state_dict()
    names = {}
    for name in state:
        if not name.endswith("num_batches_tracked"):
            names[name] = f"fc.{name[5:]}" if name.startswith("head.") else name[5:]
    theirs = {name: state[ours] for ours, name in names.items()}
    theirs |= {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    torch.save(theirs, path := tmp_path / "resnet18.pth")
    actual = starting_state(
        task_with(path, "torchvision", "body", RESNET, "classification", **PICTURES), 0, path
    )
    assert actual is not None
    for name in names:
        if name.startswith("body."):
            assert torch.equal(actual[name], state[name])
    torch.save(dict(reversed(theirs.items())), path)
    refused("resnet18", path, "torchvision", "body", RESNET, "classification", **PICTURES)


@pytest.mark.parametrize("part", ["all", "body"])
@pytest.mark.parametrize(
    "network",
    [{"name": "efficientnet_b0"}, {"name": "EfficientNetBN", "model_name": "efficientnet-b0"}],
    ids=str,
)
def test_weights_of_torchvisions_efficientnet_are_refused(
    tmp_path: Path, network: dict[str, Any], part: str
) -> None:
    """Its shapes are those of MONAI's, its padding is not."""
    task = small_task("classification", network=network, **PICTURES)
    state = []
    for name, tensor in initial_network(task, 5).state_dict().items():
        if not name.endswith("num_batches_tracked"):
            state.append(tensor)
    middle = [f"features.1.{number}.weight" for number in range(len(state) - 3)]
    path = tmp_path / "efficientnet_b0.pth"
    for names in (
        ["features.0.0.weight", *middle, "classifier.1.weight", "classifier.1.bias"],
        ["_conv_stem.weight", *middle, "w", "b"],
    ):
        torch.save(dict(zip(names, state, strict=True)), path)
        file = (path, "torchvision", part, network, "classification")
        if "_conv_stem.weight" in names:
            assert starting_state(task_with(*file, **PICTURES), 0, path) is not None
        else:
            refused("EfficientNet", *file, **PICTURES)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"file": "../a", "sha256": "0" * 64, "format": "torch"}, "file"),
        ({"file": "a", "sha256": "0" * 63, "format": "torch"}, "sha256"),
        ({"file": "a", "sha256": "0" * 64, "format": "pickle"}, "format"),
        ({"file": "a", "sha256": "0" * 64, "format": "torch", "parts": "body"}, "parts"),
        ("a.pth", "weights"),
    ],
)
def test_a_wrong_setting_is_named(weights: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        small_task(network={**NETWORK, "weights": weights})


def test_efficientnet_lite0_classifies_photographs_with_imagenet_weights() -> None:
    pytest.importorskip(
        PACKAGE, reason="the weights of EfficientNet-Lite0 are not installed (medflare[pretrained])"
    )
    from PIL import Image
    from sklearn.datasets import load_sample_images

    weights = {
        "file": "efficientnet-lite0-57934424.pth",
        "sha256": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "format": "torchvision",
    }
    thousand = {
        "target": "multiclass",
        "labels": list(map(str, range(1000))),
        "channels": 3,
        "size": [224, 224],
    }
    task = small_task(
        "classification", **thousand, network={"name": "efficientnet_lite0", "weights": weights}
    )
    start = starting_state(task, 0)
    network = initial_network(task, 0, start=start).eval()
    assert isinstance(network, nn.Module) and len(network.state_dict()) == 296
    ramp = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)
    expected = torch.tensor([-0.459170, -0.127022, 0.936315, 0.626068, 0.809393, 0.911737])
    with torch.no_grad():
        torch.testing.assert_close(network(ramp)[0, :6], expected, rtol=1e-4, atol=1e-4)
        # A palace, a daisy.
        for picture, label in zip(load_sample_images().images, (698, 985), strict=True):
            side = min(picture.shape[:2])
            (height, width) = picture.shape[:2]
            top = (height - side) // 2
            left = (width - side) // 2
            square = Image.fromarray(picture[top : top + side, left : left + side]).resize(
                (224, 224), Image.Resampling.BICUBIC
            )
            image = (
                torch.tensor(list(square.tobytes()), dtype=torch.float32)
                .reshape(1, 224, 224, 3)
                .movedim(-1, 1)
                / 127.5
                - 1
            )
            assert network(image).argmax().item() == label
