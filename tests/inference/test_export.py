import csv
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from inference.conftest import CLASSIFICATION, SEGMENTATION, Answer, Models, Runs, rows_of
from medflare.adaptation.registry import adapted_at, with_tent
from medflare.core.errors import ConfigError, ExportError
from medflare.inference.bundle import definition, inference_config
from medflare.inference.deployed import StoredModel, load_model, with_checksum
from medflare.inference.export import export, largest_difference
from medflare.inference.predict import predict
from medflare.methods.catalogue import build_deployed
from medflare.tasks.config import load_task
from medflare.training.opening import open_site

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated"),
    pytest.mark.filterwarnings("ignore::UserWarning:monai.*"),
]


IMAGES = torch.randn(9, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def built(stored: StoredModel) -> Any:
    return build_deployed(stored.task, stored.message).eval()


@pytest.fixture
def super_model(trained: Runs) -> StoredModel:
    """A super model whose members all get their turn: γ between the scores that its selector gives to random images."""
    stored = load_model(trained("fedsm") / "models/deployed")
    with torch.no_grad():
        scores = built(stored).scores(IMAGES).amax(dim=1)
    stored.message.meta["gamma"] = float(scores.median())
    return stored


def test_outputs_of_a_torchscript_file_are_arrays_without_further_code(
    trained: Runs, tmp_path: Path
) -> None:
    stored = load_model(trained("fedavg") / "models/global")
    export(stored, "torchscript", tmp_path, builder=build_deployed)
    loaded = torch.jit.load(tmp_path / "model.ts")
    with torch.no_grad():
        expected = built(stored)(IMAGES)
    np.testing.assert_allclose(loaded(IMAGES).numpy(), expected.numpy(), rtol=0, atol=1e-6)
    for parameter in loaded.parameters():
        assert not parameter.requires_grad


@pytest.mark.parametrize("combine", [None, "extra", "ensemble"])
def test_torchscript_of_super_models(
    combine: str | None, trained: Runs, super_model: StoredModel, tmp_path: Path
) -> None:
    stored = super_model
    if combine:
        stored = load_model(
            trained("fedsm_extra", combine=combine, selector_rounds=1) / "models/deployed"
        )
    result = export(stored, "torchscript", tmp_path, builder=build_deployed)
    assert result.difference < 1e-5
    card = json.loads((tmp_path / "card.json").read_text())
    assert (
        card["export"] == {"format": "torchscript", "largest_difference": result.difference}
        and with_checksum(card) == card
    )
    images = IMAGES
    model = built(stored)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.jit.load(tmp_path / "model.ts")(images), model(images), rtol=0, atol=1e-6
        )
    if combine is None:
        assert (
            model.report()["global"]
            and len([name for name in model.names if model.report()[name]]) > 1
        ), "several members answered"


@pytest.mark.slow
def test_onnx(super_model: StoredModel, untrained: Models, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for name, stored in {
        "super": super_model,
        "plain": load_model(untrained(CLASSIFICATION)),
    }.items():
        result = export(stored, "onnx", tmp_path / name, builder=build_deployed)
        assert result.difference < 1e-5
        session = onnxruntime.InferenceSession(
            str(tmp_path / name / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        images = torch.randn(7, 1, 16, 16)  # a batch of another size than any that was checked
        with torch.no_grad():
            expected = built(stored)(images)
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, {"images": images.numpy()})[0]),
            expected,
            rtol=0,
            atol=1e-5,
        )


def test_a_site_adapted_model_keeps_its_statistics(
    trained: Runs, data_root: Path, tmp_path: Path
) -> None:
    plain = load_model(trained("fedavg") / "models/global")
    site = open_site("O", SEGMENTATION, role="outside", data_root=data_root)
    stored = StoredModel(
        plain.task, adapted_at(site, plain.message, "dsbn", partial(build_deployed, plain.task)), {}
    )
    export(stored, "torchscript", tmp_path, builder=build_deployed)
    images = site.data.test.images
    recorded = torch.jit.load(tmp_path / "model.ts")
    with torch.no_grad():
        torch.testing.assert_close(recorded(images), built(stored)(images), rtol=0, atol=1e-6)
        assert not torch.allclose(recorded(images), built(plain)(images), atol=1e-3)


def branches(images: Tensor) -> Tensor:
    return images.sigmoid() if images.mean() > 0.3 else -images.sigmoid()


def unrecordable(images: Tensor) -> Tensor:
    if torch.jit.is_tracing():
        raise RuntimeError("not while tracing")
    return images


@pytest.mark.parametrize(
    ("model", "named"), [(Answer(branches), "differs"), (Answer(unrecordable), "not while tracing")]
)
def test_a_model_that_is_recorded_wrongly_or_not_at_all_is_refused(
    model: nn.Module, named: str, unfitted: StoredModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=named):
        export(unfitted, "torchscript", tmp_path / "out", builder=lambda task, message: model)
    assert not (tmp_path / "out").exists()


def test_shapes_and_nan_count_as_infinitely_different() -> None:
    assert largest_difference(lambda x: x, lambda x: x + 0.25, SEGMENTATION) == pytest.approx(0.25)
    assert largest_difference(lambda x: x, lambda x: x[:1], SEGMENTATION) == float("inf")
    assert largest_difference(lambda x: x, lambda x: x / 0, SEGMENTATION) == float("inf")


def test_models_that_adapt_and_unknown_formats_are_refused(
    trained: Runs, routed: StoredModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="routed"):
        export(routed, "onnx", tmp_path, builder=build_deployed)
    plain = load_model(trained("fedavg") / "models/global")
    tent = StoredModel(plain.task, with_tent(plain.message, plain.task), {})
    with pytest.raises(ExportError, match="tent"):
        export(tent, "torchscript", tmp_path, builder=build_deployed)
    with pytest.raises(ConfigError, match="caffe"):
        export(plain, "caffe", tmp_path)


def run_bundle(
    root: Path, images: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **override: str
) -> None:
    from monai import bundle

    monkeypatch.chdir(root)
    bundle.run(
        config_file="configs/inference.json",
        dataset_dir=str(images),
        output_dir=str(out),
        **override,
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Grey and colour, smaller, equal, larger and of other shape than the network's 16 x 16."""
    random = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    shapes = {
        "same": (16, 16),
        "large": (40, 28),
        "small": (9, 12),
        "wide": (10, 40),
        "colour": (20, 30, 3),
    }
    for name, shape in shapes.items():
        Image.fromarray(random.integers(0, 255, shape).astype(np.uint8)).save(
            folder / f"{name}.png"
        )
    colour = Image.fromarray(random.integers(0, 255, (20, 30, 3)).astype(np.uint8))
    lying = Image.Exif()
    lying[0x0112] = 6  # EXIF's orientation: the camera was held upright
    colour.save(folder / "camera.png", exif=lying)
    return folder


@pytest.mark.parametrize("without_medflare", [False, True])
def test_a_bundle_predicts_as_medflare_does(
    without_medflare: Any,
    super_model: StoredModel,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = export(super_model, "monai", tmp_path / "bundle", builder=build_deployed)
    assert result.difference < 1e-5
    script = (
        {"network_def": "$torch.jit.load('models/model.ts')", "checkpoint": "$None"}
        if without_medflare
        else {}
    )
    run_bundle(tmp_path / "bundle", pictures, tmp_path / "monai", monkeypatch, **script)
    predict(super_model, [pictures], tmp_path / "medflare", builder=build_deployed)
    actual = sorted((tmp_path / "monai").glob("*.png"))
    assert len(actual) == 6
    for file in actual:
        expected = np.asarray(Image.open(tmp_path / "medflare" / file.name)) == 3
        coloured = file.name.startswith(("colour", "camera"))  # Pillow rounds their grey values
        assert (np.asarray(Image.open(file)) == expected).mean() > (0.97 if coloured else 0.999)


def test_an_undecided_pixel_is_background_in_a_bundle_too() -> None:
    from monai.transforms import AsDiscrete

    step = inference_config(SEGMENTATION, {})["postprocessing"]["transforms"][0]
    half = torch.tensor(0.5)
    values = torch.stack([half, half.nextafter(torch.tensor(1.0))])
    assert AsDiscrete(threshold=step["threshold"])(values).tolist() == [0, 1]


def test_a_bundle_of_a_classifier_writes_a_table(
    untrained: Models, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    colour = load_task(
        {**CLASSIFICATION.to_dict(), "channels": 3, "intensity": {"name": "NormalizeIntensity"}}
    )
    stored = load_model(untrained(colour))
    export(stored, "monai", tmp_path / "bundle")
    run_bundle(tmp_path / "bundle", pictures, tmp_path / "monai", monkeypatch)
    predict(stored, [pictures], tmp_path / "medflare")
    with (tmp_path / "monai/predictions.csv").open() as file:
        actual = {Path(name).stem: list(map(float, values)) for name, *values in csv.reader(file)}
    for row in rows_of(tmp_path / "medflare"):
        expected = [float(row[f"probability_{label}"]) for label in stored.task.labels]
        assert actual[Path(row["image"]).stem] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": ("$__import__('os').system('touch owned')",), "label_values": {}},
        {"source": "@run"},
        {"name": "%secret.json"},
        {"intensity": {"name": "ScaleIntensity", "_mode_": "callable"}},
    ],
)
def test_a_card_never_becomes_code(changes: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match="MONAI"):
        definition(replace(SEGMENTATION, **changes))


def test_intensity_arguments_are_no_code_either() -> None:
    with pytest.raises(ExportError, match="print"):
        inference_config(
            replace(SEGMENTATION, intensity={"name": "ScaleIntensity", "dtype": "$print()"}), {}
        )


def test_a_module_that_no_configuration_describes_is_refused() -> None:
    with pytest.raises(ExportError, match="Identity"):
        definition(nn.Identity())
