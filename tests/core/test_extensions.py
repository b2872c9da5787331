"""Extensions of another distribution: one of every group runs if its package is trusted, and is refused otherwise."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from foreign.install import (
    EXTENSIONS,
    LAB,
    describe_groups,
    forget_extensions,
    installed_extensions,
)
from helpers import small_tasks
from helpers.fixture_types import SiteOf
from medflare import run_local
from medflare.adaptation.registry import ADAPTATIONS
from medflare.core import extensions, packages
from medflare.core.errors import ConfigError, ExportError, StateError
from medflare.core.extensions import Extensions, check_callable
from medflare.core.message import Message
from medflare.data import trial
from medflare.data.decoding import Source, _keys
from medflare.data.reading import read_stored
from medflare.data.transforms import Augmentation, Preprocessing
from medflare.data.trial import try_task
from medflare.inference import predict
from medflare.inference.deployed import StoredModel, load_model, save_model
from medflare.inference.export import FORMATS, export
from medflare.inference.inputs import find_inputs
from medflare.methods.catalogue import build_deployed
from medflare.methods.parts.robust import RobustLimits, combined
from medflare.networks.catalogue import build_network
from medflare.preparation.dataset_import.folders import scan_folder
from medflare.tasks.config import load_task
from medflare.tasks.losses import build_loss, example_batch, pools_images
from medflare.tasks.metrics_table import known_metric
from medflare.tasks.optimizers import check_optimizer

NAMES = {name for names in EXTENSIONS.values() for name in names}
PLAIN: dict[str, Any] = {**small_tasks.CLASSIFICATION, "metrics": []}
CHANGES: dict[str, dict[str, Any]] = {
    "losses": {"loss": {"name": "lab_poly", "epsilon": 2.0}},
    "metrics": {"metrics": ["lab_confidence"]},
    "transforms": {
        "intensity": {"name": "lab_halved"},
        "augment": [{"name": "lab_shifted", "prob": 1.0}],
    },
    "optimizers": {"optimizer": {"name": "lab_sign", "lr": 0.01}},
    "networks": {"network": {"name": "lab_cnn", "width": 6}},
}


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The distribution, installed and not trusted."""
    yield from installed_extensions(tmp_path, monkeypatch)


@pytest.fixture
def data(make_site: SiteOf) -> Path:
    """Two sites with grades, whose images are .npy files."""
    for name in ("A", "B"):
        folder = make_site(kind="classification", name=name)
        for picture in folder.glob("images/*.png"):
            np.save(picture.with_suffix(".npy"), np.asarray(Image.open(picture)))
            picture.unlink()
        datalist = folder / "datalist.json"
        datalist.write_text(datalist.read_text().replace(".png", ".npy"))
    return folder.parent


def test_one_of_every_group_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(extensions.PACKAGES_VARIABLE, LAB)
    # A test below runs it.
    monkeypatch.setattr(trial, "_problem", lambda *arguments: ("", ""))
    task = PLAIN
    for change in CHANGES.values():
        task = {**task, **change}
    models: list[Message] = []
    results = run_local(
        "fedavg",
        task,
        ["A", "B"],
        rule="lab_largest",
        rounds=1,
        seed=0,
        data_root=data,
        delivered=lambda site, role, model, cases: models.append(model),
    )
    assert results["status"] == "COMPLETED", results["reason"]
    assert 0 < results["sites"]["A"]["metrics"]["deployed"]["lab_confidence"] <= 1
    used = sys.modules[LAB].USED
    assert used == NAMES - {"lab_sharper"}
    monkeypatch.setattr(predict, "ADAPTATIONS", ("auto", *ADAPTATIONS))
    model = StoredModel(load_task(task), models[0], {})
    images = sorted((data / "A/images").glob("*.npy"))[:2]
    plain = predict.predict(model, images, tmp_path / "auto", builder=build_deployed, adapt="auto")
    sharper = predict.predict(
        model, images, tmp_path / "lab_sharper", builder=build_deployed, adapt="lab_sharper"
    )
    assert not plain.failed and not sharper.failed and "lab_sharper" in used
    texts = [
        (tmp_path / adapt / "predictions.csv").read_text() for adapt in ("auto", "lab_sharper")
    ]
    assert texts[0] != texts[1]


def reason(task: dict[str, Any], rule: str) -> str:
    """Why a run is refused, or fails before its first round."""
    try:
        results = run_local("fedavg", task, 2, rule=rule, rounds=1, seed=0)
    except ConfigError as error:
        return str(error)
    assert not results["rounds"]
    return str(results["reason"])


@pytest.mark.parametrize("group", [*CHANGES, "rules"])
def test_none_is_imported_if_its_package_is_not_trusted(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for named in ("", "lab", "lab_extensions_2", f"{LAB}.other"):
        monkeypatch.setenv(extensions.PACKAGES_VARIABLE, named)
        rule = "lab_largest" if group == "rules" else "mean"
        task = {**PLAIN, **CHANGES.get(group, {})}
        text = reason({**task, "embedded": "phantom"}, rule)
        assert any(name in text for name in EXTENSIONS[group]) and "\n" not in text
    assert LAB not in sys.modules


REQUESTS: dict[str, Callable[[Path], Any]] = {
    "lab_poly": lambda data: build_loss(load_task({**PLAIN, **CHANGES["losses"]})),
    "lab_confidence": lambda data: known_metric("lab_confidence", ""),
    "lab_halved": lambda data: Preprocessing(load_task({**PLAIN, **CHANGES["transforms"]})),
    "lab_shifted": lambda data: Augmentation(load_task({**PLAIN, **CHANGES["transforms"]})),
    "lab_sign": lambda data: check_optimizer({"name": "lab_sign"}, ""),
    "lab_cnn": lambda data: build_network({"name": "lab_cnn"}, 1, 3),
    "lab_sharper": lambda data: ADAPTATIONS["lab_sharper"],
    "lab_largest": lambda data: combined({"A": {}}, {"A": 1.0}, "lab_largest", RobustLimits()),
    "npy": lambda data: read_stored(data / "A/images/0.npy"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_refusal_names_distribution_and_remedy(name: str, data: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        REQUESTS[name](data)
    text = str(refused.value)
    assert (
        name in text
        and "lab-extensions" in text
        and f"{extensions.PACKAGES_VARIABLE}={LAB}" in text
    )
    assert "\n" not in text and LAB not in sys.modules
    extensions.trust(LAB)
    assert REQUESTS[name](data) is not None or name == "lab_sign"
    assert set(REQUESTS) == NAMES


def test_a_name_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    def load(name: str) -> Any:
        forget_extensions()
        return Extensions("loss", "losses", lambda: {"ce"}, check_callable).foreign(name)

    extensions.trust("other")
    extensions.trust(LAB)
    points = {"ce": "other:x", "lab_poly": "other:y", "odd": "other:NUMBER", "gone": "other.no:x"}
    describe_groups(tmp_path / "site-packages", "other-losses", {"losses": points})
    (tmp_path / "site-packages" / "other.py").write_text("NUMBER = 3")
    for name in points:
        with pytest.raises(ConfigError, match="other-losses") as refused:
            load(name)
        assert name in str(refused.value)
    assert load("dice") is None
    with pytest.raises(ConfigError, match="lab-extensions"):
        load("lab_poly")


def test_packages_of_the_variable_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extensions.PACKAGES_VARIABLE, f"other, {LAB}.")
    assert extensions.trusted() == (LAB, "other")


@pytest.mark.parametrize("change", [{"metric": "lab_confidence"}, {"metrics": ["lab_confidence"]}])
def test_a_metric_that_is_not_trusted_is_not_called_unknown(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not trust lab_extensions"):
        load_task({**PLAIN, **change})
    extensions.trust(LAB)
    load_task({**PLAIN, **change})
    with pytest.raises(ConfigError, match="unknown metric 'lab_confidence'"):
        load_task({**small_tasks.SEGMENTATION, "metrics": ["lab_confidence"]})


def test_a_model_of_a_package_that_is_not_trusted_names_the_package_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions.trust(LAB)
    task = load_task({**PLAIN, **CHANGES["metrics"]})
    save_model(tmp_path, task, Message({"model": {}}, {"kind": "plain"}), {})
    monkeypatch.setattr(extensions, "_trusted", set())
    forget_extensions()
    first = r"here: metric 'lab_confidence' of .* does not trust lab_extensions: to trust it"
    with pytest.raises(StateError, match=rf"{first}.*; or use the medflare that wrote it \(0\."):
        load_model(tmp_path)


def test_the_trial_of_a_task_trusts_all_that_this_process_trusts() -> None:
    augment = [{"name": "RandZoom"}, *CHANGES["transforms"]["augment"]]
    task = load_task({**PLAIN, "augment": augment})
    with pytest.raises(ConfigError, match=r"^transform 'lab_shifted'.* does not trust"):
        try_task(task, 4.0, "site A")
    extensions.trust(LAB)
    try_task(task, 4.0, "site A")


def test_files_of_a_reader_are_in_folders(data: Path, tmp_path: Path) -> None:
    folder = data / "A" / "images"
    files = sorted(folder.glob("*.npy"))
    scanned = scan_folder(folder)
    assert files and list(scanned.images) == files and scanned.notes == ()
    assert sorted(item.path for item in find_inputs([folder], tmp_path / "out")[0]) == files


@pytest.mark.parametrize("changed", ["readers", "transforms"])
def test_cached_images_depend_on_the_code_that_read_them(
    changed: str, lab: Path, data: Path
) -> None:
    extensions.trust(LAB)
    task = load_task(PLAIN)
    if changed == "transforms":
        task = load_task({**PLAIN, **CHANGES["transforms"]})
    source = Source(data / "A", task)
    entries = source.listed_items()
    if changed == "transforms":
        entries = [replace(entry, image=entry.image.with_suffix(".png")) for entry in entries]

    def keys() -> list[str]:
        packages._code_hash.cache_clear()
        return _keys(task, source, entries)

    before = keys()
    assert keys() == before
    with (lab / LAB / "__init__.py").open("a") as file:
        file.write("# another version")
    assert not set(keys()) & set(before)
    packages._code_hash.cache_clear()


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_with_an_adaptation_is_not_exported(format: str, tmp_path: Path) -> None:
    model = Message({"model": {}}, {"kind": "lab_sharper", "base": "plain"})
    with pytest.raises(ExportError, match=rf"lab_sharper.*{LAB}"):
        export(StoredModel(load_task(PLAIN), model, {}), format, tmp_path / "out")


@pytest.mark.parametrize("target", ["os:system", "torch.nn:MSELoss", "medflare.cli.command:main"])
def test_libraries_are_refused_even_if_they_are_trusted(target: str, tmp_path: Path) -> None:
    package = target.split(":")[0]
    extensions.trust(package)
    describe_groups(tmp_path / "site-packages", "sly", {"losses": {"sly": target}})
    with pytest.raises(ConfigError, match=package.split(".")[0]):
        build_loss(load_task({**PLAIN, "loss": {"name": "sly"}}))


WRONG = """
import torch
from monai.transforms import MapTransform, RandomizableTransform
class Moves(RandomizableTransform, MapTransform):
    pass
class Draws(Moves):
    spatial = False
    def __init__(self, keys):
        MapTransform.__init__(self, keys)
    def __call__(self, sample):
        return {**sample, "image": sample["image"] + torch.rand(1)}
class Each(torch.nn.Module):
    def forward(self, logits, targets):
        return logits
class Closure(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self, closure):
        closure()
class Logits(torch.nn.Sequential):
    def forward(self, images):
        return super().forward(images).log()
def logits(model, task, message):
    return Logits(model)
def needs_norm(model, task, message):
    return model.norm
def drops(states, shares, origin):
    return {"weight": states["A"]["weight"]}
"""


def test_a_wrong_one_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "wrong.py").write_text(WRONG)
    points = {
        "losses": {"w_each": "wrong:Each"},
        "transforms": {"w_moves": "wrong:Moves", "w_draws": "wrong:Draws"},
        "optimizers": {"w_closure": "wrong:Closure", "w_loss": "wrong:Each"},
        "rules": {"w_drops": "wrong:drops"},
        "adaptations": {"w_logits": "wrong:logits", "w_norm": "wrong:needs_norm"},
    }
    describe_groups(tmp_path / "site-packages", "wrong", points)
    forget_extensions()
    extensions.trust("wrong")
    task = {**PLAIN, "augment": [{"name": "w_moves"}]}
    draws = load_task({**PLAIN, "augment": [{"name": "w_draws"}]})
    requests: dict[str, Callable[[], Any]] = {
        "w_each": lambda: build_loss(load_task({**PLAIN, "loss": {"name": "w_each"}})),
        "w_moves": lambda: Augmentation(load_task(task)),
        "w_draws: two equal generators": lambda: try_task(draws, 4.0, "site A"),
        "w_closure": lambda: check_optimizer({"name": "w_closure"}, ""),
        "w_logits": lambda: ADAPTATIONS["w_logits"],
        "w_loss": lambda: check_optimizer({"name": "w_loss"}, ""),
        "w_drops": lambda: run_local("fedavg", PLAIN, 2, rounds=1, seed=0, rule="w_drops"),
    }
    for name, request in requests.items():
        with pytest.raises(ConfigError, match=name):
            request()
    assert ADAPTATIONS["w_norm"] is not None, "it may need another model"
    sys.modules.pop("wrong")


METRICS = """
import numpy
from medflare.tasks.metrics_table import METRICS, Metric
def entropy(probabilities, targets, weights, target):
    logs = numpy.log(probabilities.clip(1e-12))
    return weights @ -(probabilities * logs).sum(axis=1) / weights.sum(axis=-1)
ENTROPY = Metric("classes", "entropy", entropy, "no image")
"""


def test_a_metric_that_cannot_be_used_is_refused_only_where_it_is_named(lab: Path) -> None:
    (lab / "their_metrics.py").write_text(METRICS)
    targets = {"entropy": "ENTROPY", "gone": "GONE", "f1_macro": "ENTROPY", "auc_macro": "ENTROPY"}
    points = {name: f"their_metrics:{target}" for name, target in targets.items()}
    describe_groups(lab, "their-metrics", {"metrics": points})
    forget_extensions()
    assert load_task({**PLAIN, "metrics": ["f1_macro"]}).test_metrics == ("accuracy", "f1_macro")
    extensions.trust("their_metrics")
    assert "f1_macro" in load_task(PLAIN).test_metrics
    with pytest.raises(ConfigError, match=r"'entropy' of .*their-metrics.*bounds are 0 to 1"):
        known_metric("entropy", "")
    for name in points:
        with pytest.raises(ConfigError, match=f"{name}.*their-metrics"):
            load_task({**PLAIN, "metrics": [name]})
    sys.modules.pop("their_metrics")


def test_an_unknown_name_has_the_nearest_of_other_distributions_too() -> None:
    for spec in ({"loss": {"name": "lab_polly"}}, {"optimizer": {"name": "lab_sing", "lr": 0.1}}):
        with pytest.raises(ConfigError, match=r"mean lab_(poly|sign)\?"):
            build_loss(load_task({**PLAIN, **spec}))


def test_transforms_are_for_their_setting_and_losses_may_pool(data: Path) -> None:
    extensions.trust(LAB)
    with pytest.raises(ConfigError, match=r"lab_halved.*intensity"):
        Augmentation(load_task({**PLAIN, "augment": [{"name": "lab_halved"}]}))
    task = load_task({**PLAIN, **CHANGES["losses"]})
    assert pools_images(task) is not None
    value = build_loss(task)(torch.zeros(2, 3), torch.tensor([0, 2]))
    assert value.item() == pytest.approx(np.log(3) + 2 * (1 - 1 / 3))


NETWORK = """
def tiny_cnn(in_channels, out_channels):
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, out_channels)
    )
"""


def test_the_examples_of_contributing_work(lab: Path, data: Path) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    groups: dict[str, dict[str, str]] = {}
    shutil.rmtree(lab / "lab_extensions-0.1.dist-info")
    package = lab / "our_package"
    package.mkdir()
    pattern = r'```toml\n\[project.entry-points."medflare\.(\w+)"\]\n(\w+) = "our_package\.(\w+):(\w+)"\n```\n'
    for found in re.finditer(pattern + r"(?:\n```python\n(.*?)```)?", text, re.DOTALL):
        group, name, module, target, code = found.groups()
        groups[group] = {name: f"our_package.{module}:{target}"}
        (package / f"{module}.py").write_text(f"import torch\n{code or NETWORK}")
    assert set(groups) == set(EXTENSIONS)
    describe_groups(lab, "our-package", groups)
    forget_extensions()
    extensions.trust("our_package")
    ours = {group: next(iter(names)) for group, names in groups.items()}
    task = load_task(
        {
            **PLAIN,
            "network": {"name": ours["networks"]},
            "loss": {"name": ours["losses"], "epsilon": 2.0},
            "metrics": [ours["metrics"]],
            "augment": [{"name": ours["transforms"]}],
            "optimizer": {"name": ours["optimizers"], "lr": 0.1},
        }
    )
    assert build_loss(task)(*example_batch(task)).ndim == 0
    check_optimizer(task.optimizer, "")
    images = torch.zeros(2, 1, 16, 16)
    shifted, _ = Augmentation(task)(images, torch.zeros(2), np.random.RandomState(0))
    assert shifted.shape == images.shape and not torch.equal(shifted, images)
    model = torch.nn.Sequential(build_network(task.network, 1, 3), torch.nn.Softmax(dim=1))
    adapted = ADAPTATIONS[ours["adaptations"]](model, task, Message({}, {}))
    assert torch.allclose(adapted.eval()(images).sum(dim=1), torch.ones(2))
    states = {"A": {"w": torch.zeros(1)}, "B": {"w": torch.ones(1)}}
    limits = RobustLimits()
    assert combined(states, {"A": 0.4, "B": 0.6}, ours["rules"], limits)[0] == states["B"]
    assert read_stored(data / f"A/images/0.{ours['readers']}").array.shape == (1, 16, 16)
    for module in [name for name in sys.modules if name.startswith("our_package")]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ["unet", "UNet"])
def test_a_network_with_a_built_in_name_is_refused(name: str, lab: Path) -> None:
    extensions.trust(LAB)
    describe_groups(lab, "other", {"networks": {name: f"{LAB}:linear_cnn"}})
    forget_extensions()
    with pytest.raises(ConfigError, match="in use"):
        build_network({"name": name}, 1, 3)
