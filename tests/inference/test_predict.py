import json
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import medflare
from helpers.final_models import probabilities
from helpers.small_tasks import predicted, score, small_task
from helpers.volume_sites import dicom_slice
from inference.conftest import CLASSIFICATION, SEGMENTATION, Answer, Models, Runs, rows_of
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data import reading
from medflare.data.acquisition import acquisition_of
from medflare.data.loading import SiteData, Split
from medflare.data.local import DATA_FOLDERS_VARIABLE, ImageBounds
from medflare.inference.deployed import StoredModel, load_model, plain_message
from medflare.inference.inputs import Input
from medflare.inference.predict import PreparedImage, predict, predictions, prepare
from medflare.methods.catalogue import build_deployed
from medflare.methods.fedsm.super_model import SuperModel
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site
from medflare.training.scoring import scoring_batch
from medflare.training.site import Site


def test_the_package_predicts_as_the_command_does(
    trained: Runs, data_root: Path, tmp_path: Path
) -> None:
    model = trained("fedsm") / "models/deployed"
    images = data_root / "A/test"
    assert main(["predict", str(model), str(images), "--out", str(tmp_path / "command")]) == 0
    of_folder = medflare.predict(model, str(images), tmp_path / "folder")
    of_stored = medflare.predict(
        medflare.load_model(str(model)), [images], str(tmp_path / "stored"), strict=True
    )
    assert of_folder.images == of_stored.images == 9 and not of_folder.failed
    masks = sorted(
        path.relative_to(tmp_path / "command") for path in (tmp_path / "command").rglob("*.png")
    )
    assert len(masks) == 9
    for name in masks:
        expected = (tmp_path / "command" / name).read_bytes()
        assert (
            (tmp_path / "folder" / name).read_bytes()
            == (tmp_path / "stored" / name).read_bytes()
            == expected
        )


@pytest.mark.parametrize("role", ["global", "personal", "deployed"])
def test_a_sites_test_images_give_the_numbers_of_the_run(
    role: str, trained: Runs, data_root: Path, tmp_path: Path
) -> None:
    folder = trained("fedsm", choose_by="image")  # `predict` knows no patients
    stored = load_model(folder / "sites/B" / role)
    site = open_site("B", SEGMENTATION, data_root=data_root)
    expected = predicted(site, build_deployed(stored.task, stored.message), "test")
    actual = probabilities(stored, data_root / "B/test", tmp_path)
    assert torch.equal(actual, expected), "bitwise: same images, order and batches"
    results = json.loads((folder / "results.json").read_text())
    data = site.data.test
    measured = score(actual, data.targets, data.patients, SEGMENTATION, ["dice"], data.spacings)
    assert measured.values["dice"] == results["sites"]["B"]["metrics"][role]["dice"]


def test_the_same_for_classification(
    trained: Runs, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        DATA_FOLDERS_VARIABLE, str(data_root)
    )  # its datalists name pictures beside their folder

    def opener(name: str, role: str) -> Site:
        return open_site(name, CLASSIFICATION, data_root=data_root / name / "grades")

    run = trained("fedsm", CLASSIFICATION, opener=opener, choose_by="image")
    stored = load_model(run / "sites/A/deployed")
    predict(stored, [data_root / "A/test"], tmp_path, builder=build_deployed)
    rows = rows_of(tmp_path)
    probabilities = []
    for row in rows:
        probabilities.append([float(row[f"probability_{label}"]) for label in stored.task.labels])
    written = torch.tensor(probabilities)
    site = open_site("A", CLASSIFICATION, data_root=data_root / "A/grades")
    expected = predicted(site, build_deployed(stored.task, stored.message), "test")
    assert torch.equal(written, expected), "nine digits hold a float32"
    assert [row["label"] for row in rows] == [
        stored.task.labels[place] for place in expected.argmax(dim=1).tolist()
    ]
    assert {row["model"] for row in rows} <= {"global", "A", "B"} and "mask" not in rows[0]


def test_a_routed_model_is_fitted_to_the_images_as_it_was_in_the_run(
    routed: StoredModel, data_root: Path, tmp_path: Path
) -> None:
    site = open_site("O", SEGMENTATION, role="outside", data_root=data_root)
    expected = predicted(site, build_deployed(routed.task, routed.message), "test")
    assert routed.kind == "routed"
    assert torch.equal(probabilities(routed, data_root / "O/test", tmp_path), expected)
    assert torch.equal(
        probabilities(routed, data_root / "O/test", tmp_path, adapt="none"), expected
    ), "the fit that was delivered"
    refitted = probabilities(routed, data_root / "A/test", tmp_path)
    assert not torch.equal(
        refitted, probabilities(routed, data_root / "A/test", tmp_path, adapt="none")
    )
    states = {entry: state for entry, state in routed.message.states.items() if entry != "router"}
    unfitted = StoredModel(routed.task, Message(states, routed.message.meta), {})
    assert torch.equal(refitted, probabilities(unfitted, data_root / "A/test", tmp_path)), (
        "whatever it was fitted to before"
    )


@pytest.mark.parametrize("tta", ["dsbn", "auto"])
def test_images_for_adaptation_are_read_again_and_not_kept(
    tta: str,
    routed: StoredModel,
    trained: Runs,
    data_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = routed if tta == "auto" else load_model(trained("fedavg") / "sites/A/global")
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(source: Input, task: TaskConfig, bounds: ImageBounds) -> PreparedImage:
        nonlocal most
        actual = prepare(source, task, bounds)
        seen.append(weakref.ref(actual.images))
        most = max(most, sum(one() is not None for one in seen))
        return actual

    monkeypatch.setattr("medflare.inference.predict.prepare", watched)
    for site in "ABO":
        shutil.copytree(data_root / site / "test", tmp_path / "images" / site)
    (tmp_path / "images/A/5.png").write_bytes(b"no picture")
    output: list[str] = []
    summary = predict(
        stored,
        [tmp_path / "images"],
        tmp_path / "out",
        builder=build_deployed,
        adapt=tta,
        say=output.append,
    )
    assert summary.images == 26 and len(summary.failed) == 1
    unseen = [line for line in output if "outside the range of the training images" in line]
    assert len(output) == len(unseen) + 1
    assert len(seen) > 2 * 26 and "adapted to 26 pictures" in summary.adapted
    assert most <= 2 * scoring_batch(stored.task)


def test_slices_of_one_volume_are_of_one_patient() -> None:
    def brighter(images: Tensor) -> Tensor:
        means = images.mean(dim=(1, 2, 3))
        return torch.stack([means, -means], dim=1)

    levels = torch.tensor([5.0, -1.0, *[0.5] * 8])
    images = levels[:, None, None, None].expand(-1, 1, 4, 4).contiguous()
    networks: list[nn.Module] = []
    for logit in (3.0, -3.0, 0.0):
        networks.append(Answer(partial(torch.full_like, fill_value=logit)))
    model = SuperModel(
        SEGMENTATION, networks, Answer(brighter), ["global", "A", "B"], 0.0, "patient"
    ).eval()
    data = Split(images, torch.zeros(10, 1, 4, 4), ("p",) * 10, tuple(map(str, range(10))))
    site = Site("S", SEGMENTATION, SiteData(data, data, data))
    expected = torch.cat([answer[0] for answer in site.predictions(model, "test")])
    acquired = acquisition_of(reading.Image(images[0].numpy()), SEGMENTATION)
    volume = PreparedImage(Input(Path("v.nii"), "v"), images, (4, 4), True, acquired)
    pictures = [
        PreparedImage(Input(Path("p.png"), "p"), image[None], (4, 4), False, acquired)
        for image in images[:2]
    ]
    whole, *alone = predictions(model, [volume, *pictures], SEGMENTATION)
    assert (
        torch.equal(whole.probabilities, expected)
        and len(set(whole.predicted_by)) == 1
        and len(whole.predicted_by) == 10
    )
    assert len({one.predicted_by for one in alone}) == 2, "pictures may be of several patients"
    _, *again = predictions(model, [volume, *pictures], SEGMENTATION)
    assert [one.predicted_by for one in again] == [one.predicted_by for one in alone]
    assert not model._forward_hooks, "an earlier call notes nothing of a later one"


def test_masks_and_table(trained: Runs, data_root: Path, tmp_path: Path) -> None:
    stored = load_model(trained("fedsm") / "sites/A/deployed")
    summary = predict(stored, [data_root / "A/test"], tmp_path, builder=build_deployed)
    rows = rows_of(tmp_path)
    assert (
        summary.images == len(rows) == 9
        and not summary.failed
        and sum(summary.predicted_by.values()) == 9
    )
    assert list(rows[0]) == ["image", "slice", "mask", "pixels_square", "model", "outside_training"]
    for row, p in zip(rows, probabilities(stored, data_root / "A/test", tmp_path), strict=True):
        mask = np.asarray(Image.open(tmp_path / row["mask"]))
        # The first value of the task's label.
        np.testing.assert_array_equal(mask, np.where(p[0] > 0.5, 3, 0))
        assert int(row["pixels_square"]) == (mask == 3).sum() and row["slice"] == ""
    assert {row["model"] for row in rows} == set(summary.predicted_by)
    first = tmp_path / "A/test" / rows[0]["image"]
    again = predict(stored, [first], tmp_path, builder=build_deployed)
    assert "8 files of earlier predictions are left" in again.render()
    assert summary.left_over == 0
    assert repr(again) == again.render()
    assert repr(stored) == f"<super model for task {stored.task.name}>"


def test_every_format_in_its_own_geometry(tmp_path: Path, untrained: Models) -> None:
    random = np.random.default_rng(0)
    flat = random.integers(0, 255, (30, 22)).astype(np.uint8)
    volume = random.integers(0, 255, (22, 30, 5)).astype(np.uint8)
    images = tmp_path / "images"
    images.mkdir()
    for name in ("p.png", "j.jpg", "t.tif"):
        Image.fromarray(flat).save(images / name)
    Image.fromarray(np.dstack([flat] * 3)).save(images / "colour.png")
    affine = np.array([[0, 0, 3, 1], [-2, 0, 0, 2], [0, 1, 0, 3], [0, 0, 0, 1]])  # slices along x
    nibabel.save(nibabel.Nifti1Image(volume, affine), images / "v.nii.gz")
    dicom_slice(images / "single", flat)
    for number in range(3):
        dicom_slice(images / f"ct/{number}", flat, number)
    summary = predict(load_model(untrained()), [images], tmp_path / "out")
    assert not summary.failed and summary.images == 7
    actual = {
        file.relative_to(tmp_path / "out").as_posix(): file
        for file in (tmp_path / "out").rglob("*_seg*")
    }
    assert set(actual) == {
        "p_seg.png",
        "j_seg.png",
        "t_seg.png",
        "colour_seg.png",
        "single_seg.png",
        "v_seg.nii.gz",
        "ct_seg.nii.gz",
    }
    assert {Image.open(file).size for name, file in actual.items() if name.endswith(".png")} == {
        (22, 30)
    }
    written = nibabel.load(actual["v_seg.nii.gz"])
    assert written.shape == volume.shape
    np.testing.assert_array_equal(written.affine, affine)
    assert nibabel.load(actual["ct_seg.nii.gz"]).shape == (22, 30, 3)
    slices = [
        row["slice"] for row in rows_of(tmp_path / "out") if row["image"].endswith("v.nii.gz")
    ]
    assert slices == list(map(str, range(30))), (
        "slices along the axis that is axial once the volume is turned to LPS"
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_volume_is_its_slices(axis: int, tmp_path: Path) -> None:
    """Each slice of a predicted volume is the prediction of that slice alone, by a model that calls bright what is bright."""
    task = load_task({**SEGMENTATION.to_dict(), "slices": {"axis": axis}})
    # (left, posterior, superior).
    volume = np.random.default_rng(0).integers(0, 255, (9, 7, 5)).astype(np.uint8)
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1, -1, 1, 1])), tmp_path / "v.nii")
    predicted_by_brightness = partial(
        predict,
        StoredModel(task, plain_message({}), {}),
        builder=lambda task, message: nn.Identity(),
    )
    predicted_by_brightness([tmp_path / "v.nii"], tmp_path / "whole")
    whole = np.asarray(nibabel.load(tmp_path / "whole/v_seg.nii.gz").dataobj)
    assert whole.shape == volume.shape and 0.3 < (whole == 3).mean() < 0.7
    assert ((whole == 3) == (volume > 127)).mean() > 0.8, (
        "resized to the network and back, slices stand where they stood"
    )
    read = volume.transpose(1, 0, 2)  # as readers lay it out: rows, columns, slices
    for number in range(read.shape[axis]):
        picture = np.take(read, number, axis=axis)
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
        predicted_by_brightness([tmp_path / f"{number}.png"], tmp_path / "alone")
        alone = np.asarray(Image.open(tmp_path / f"alone/{number}_seg.png"))
        np.testing.assert_array_equal(alone, np.take(whole.transpose(1, 0, 2), number, axis=axis))


def test_multilabel_and_binary_tables(data_root: Path, tmp_path: Path, untrained: Models) -> None:
    several = small_task(
        "classification", target="multilabel", labels=["oedema", "nodule"], loss={"name": "bce"}
    )
    one = small_task("classification", target="binary", labels=["melanoma"], loss={"name": "bce"})
    for task in (several, one):
        predict(
            load_model(untrained(task)), [data_root / "A/test"], tmp_path / f"out-{task.target}"
        )
    for row in rows_of(tmp_path / "out-multilabel"):
        chosen = [label for label in several.labels if float(row[f"probability_{label}"]) > 0.5]
        assert row["label"] == ";".join(chosen)
    for row in rows_of(tmp_path / "out-binary"):
        p = float(row["probability_melanoma"])
        assert float(row["probability_not melanoma"]) == pytest.approx(1 - p)
        assert row["label"] == ("melanoma" if p > 0.5 else "not melanoma")


def test_batches_run_across_files(tmp_path: Path) -> None:
    sizes = []

    def counting(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images

    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 11), np.uint8), np.eye(4)), tmp_path / "v.nii")
    Image.fromarray(np.full((4, 4), 255, np.uint8)).save(tmp_path / "p.png")
    prepared = [
        prepare(Input(tmp_path / name, name), SEGMENTATION) for name in ("p.png", "v.nii", "p.png")
    ]
    actual = list(predictions(Answer(counting), prepared, SEGMENTATION))
    assert sizes == [8, 5]
    assert [part.probabilities.mean().item() for part in actual] == [1, 0, 1]


def test_a_broken_image_is_named_and_the_others_are_predicted(
    tmp_path: Path, data_root: Path, capsys: pytest.CaptureFixture[str], untrained: Models
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "c.png"):
        (images / name).write_bytes((data_root / "A/test/0.png").read_bytes())
    (images / "b.png").write_bytes((data_root / "A/test/0.png").read_bytes()[:60])
    bad = np.full((4, 4, 2), np.nan, np.float32)
    nibabel.save(nibabel.Nifti1Image(bad, np.eye(4)), images / "d.nii.gz")
    (tmp_path / "empty").mkdir()
    arguments = [str(untrained()), str(images), str(tmp_path / "empty"), str(tmp_path / "gone.png")]
    status = main(["predict", *arguments, "--out", str(tmp_path / "out")])
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert status == 1 and len(lines) == 4, lines
    for name in ("empty", "gone.png", "b.png", "d.nii.gz"):
        assert sum(name in line for line in lines) == 1
    assert "2 images predicted, 4 failed" in output.out
    assert [Path(row["image"]).name for row in rows_of(tmp_path / "out")] == ["a.png", "c.png"]
    assert {file.name for file in (tmp_path / "out/images").iterdir()} == {"a_seg.png", "c_seg.png"}


def test_a_nan_prediction_fails(tmp_path: Path, data_root: Path, unfitted: StoredModel) -> None:
    broken = Answer(
        lambda images: torch.where(
            images.mean(dim=(1, 2, 3), keepdim=True) > 0.3, torch.nan, images
        )
    )
    summary = predict(
        unfitted, [data_root / "A/test"], tmp_path, builder=lambda task, message: broken
    )
    assert 0 < summary.images < 9 and summary.images + len(summary.failed) == 9


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"adapt": "magic"}, "magic"),
        ({"device": "cuda:77"}, "cuda:77"),
        ({"device": "toaster"}, "toaster"),
        ({"adapt": "tent"}, "BatchNorm"),
    ],
)
def test_a_wrong_setting_is_refused(
    settings: dict[str, Any], named: str, tmp_path: Path, data_root: Path, untrained: Models
) -> None:
    task = load_task(
        {
            **SEGMENTATION.to_dict(),
            "network": {"name": "unet", "channels": [4, 8], "norm": "instance"},
        }
    )
    with pytest.raises(ConfigError, match=named):
        predict(load_model(untrained(task)), [data_root / "A/test"], tmp_path / "out", **settings)


def test_a_mask_that_cannot_be_written_is_reported_and_the_others_are_written(
    untrained: Models, tmp_path: Path
) -> None:
    """Bright is the second class, whose value does not fit a PNG."""

    classes = Answer(
        lambda images: torch.cat([images[:, :1] <= 0.5, images[:, :1] > 0.5], dim=1).float()
    )
    values = {"background": [0], "square": [70000]}
    task = load_task(
        {
            **SEGMENTATION.to_dict(),
            "target": "multiclass",
            "labels": list(values),
            "label_values": values,
        }
    )
    stored = StoredModel(task, plain_message({}), {})
    for name, level in (("dark", 0), ("light", 255)):
        dicom_slice(tmp_path / f"in/{name}/one", np.full((8, 8), level, np.uint8))
    summary = predict(
        stored, [tmp_path / "in"], tmp_path / "out", builder=lambda task, message: classes
    )
    assert summary.images == 1 and len(rows_of(tmp_path / "out")) == 1
    assert len(summary.failed) == 1 and "light/one" in summary.failed[0]


def test_an_image_that_is_too_large_names_the_option_that_takes_it(
    untrained: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "large.png")
    call = [
        "predict",
        str(untrained()),
        str(tmp_path / "large.png"),
        "--out",
        str(tmp_path / "out"),
        "--max-pixels",
    ]
    assert main([*call, "599"]) == 1
    assert "large.png" in (output := capsys.readouterr().err) and "--max-pixels" in output
    assert main([*call, "600"]) == 0
