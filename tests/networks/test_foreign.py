"""Networks of other packages: imported only if trusted, built from the task."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from medflare.core import extensions
from medflare.core.errors import ConfigError
from medflare.core.extensions import PACKAGES_VARIABLE
from medflare.data.local import local_settings
from medflare.data.trial import try_task
from medflare.networks import foreign
from medflare.networks.catalogue import build_network
from medflare.networks.foreign import foreign_module
from medflare.tasks.config import load_task

CODE = """
from torch import nn
from torch.nn import Sequential
from medflare.networks.features import FeatureNetwork
from medflare.networks.foreign import register

LOUD = 1

class Plain(nn.Module):
    def __init__(self, in_channels, out_channels, spatial_dims, width=4):
        super().__init__()
        assert spatial_dims == 2
        self.first, self.last = nn.Conv2d(in_channels, width, 3, padding=1), nn.Conv2d(width, out_channels, 1)

    def forward(self, images):
        return self.last(self.first(images).relu())

@register
def cut(in_channels, out_channels):
    return FeatureNetwork(nn.Conv2d(in_channels, 3, 1), nn.Conv2d(3, out_channels, 1))

@register
def wrong(in_channels, out_channels):
    return "no network"

def unregistered(in_channels, out_channels):
    CALLED.append(1)

class Other:
    def __init__(self, in_channels, out_channels):
        CALLED.append(1)

CALLED = []
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_nets").mkdir()
    (tmp_path / "lab_nets" / "__init__.py").write_text("")
    (tmp_path / "lab_nets" / "small.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(extensions, "_trusted", set())
    for name in [name for name in sys.modules if name.split(".")[0] == "lab_nets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv(PACKAGES_VARIABLE, raising=False)


def test_a_package_that_is_not_trusted_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for named in ("", "lab", "lab_nets.other", "other,lab_net"):
        monkeypatch.setenv(PACKAGES_VARIABLE, named)
        with pytest.raises(ConfigError, match="lab_nets"):
            build_network({"name": "lab_nets.small:Plain"}, 1, 2)


def test_the_trial_of_a_task_trusts_what_this_process_trusts() -> None:
    network = {"name": "lab_nets.small:Plain", "width": 8}
    task = load_task({**load_task("phantom").to_dict(), "network": network})
    with pytest.raises(ConfigError, match="lab_nets"):
        try_task(task, 4.0, "site A")
    foreign.trust("lab_nets")
    try_task(task, 4.0, "site A")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "medflare.cli.command:main",
        "torch.nn:Linear",
        "monai.networks.nets:UNet",
        "nvflare.tool:x",
    ],
)
def test_libraries_are_refused_even_if_they_are_named_as_trusted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = name.partition(":")[0]
    monkeypatch.setenv(PACKAGES_VARIABLE, package)
    foreign.trust(package)
    with pytest.raises(ConfigError, match=package.split(".")[0]):
        build_network({"name": name}, 1, 2)
    with pytest.raises(ConfigError, match="packages"):
        local_settings({"packages": [package]})


@pytest.mark.parametrize("name", ["unregistered", "Other", "LOUD", "Sequential", "register"])
def test_only_a_network_or_what_the_package_registers_is_called(name: str) -> None:
    foreign.trust("lab_nets")
    with pytest.raises(ConfigError, match=name):
        build_network({"name": f"lab_nets.small:{name}"}, 1, 2)
    assert importlib.import_module("lab_nets.small").CALLED == []


@pytest.mark.parametrize("named", ["lab_nets", "lab_nets.", "other, lab_nets.small"])
def test_the_environment_names_trusted_packages(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv(PACKAGES_VARIABLE, named)
    features, logits = build_network(
        {"name": "lab_nets.small:Plain", "width": 6}, 1, 2
    ).features_and_output(torch.rand(2, 1, 8, 8))
    assert features.shape == (2, 6, 8, 8) and logits.shape == (2, 2, 8, 8)


def test_a_function_of_a_trusted_package_builds_a_feature_network() -> None:
    foreign.trust("lab_nets.small")
    network = build_network({"name": "lab_nets.small:cut"}, 1, 2)
    assert set(network.state_dict()) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert network.settings["spec"] == {"name": "lab_nets.small:cut"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lab_nets.small:Plane", {}),
        ("lab_nets.small:wrong", {}),
        ("lab_nets.small:Plain", {"widht": 3}),
    ],
)
def test_a_name_or_argument_that_the_package_lacks_is_refused(
    name: str, arguments: dict[str, int]
) -> None:
    foreign.trust("lab_nets.small")
    with pytest.raises(ConfigError, match=name):
        build_network({"name": name, **arguments}, 1, 2)


def test_only_a_name_with_a_colon_has_a_module() -> None:
    assert (
        foreign_module({"name": "unet"}) == foreign_module({}) == ""
        and foreign_module({"name": "lab_nets.small:Plain"}) == "lab_nets.small"
    )
