"""`predict` names the images that lie outside what a model was trained on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from helpers.small_tasks import small_task
from helpers.volume_sites import TASK, make_sites
from inference.conftest import Models, Runs, rows_of
from medflare.cli import main
from medflare.core.message import Message
from medflare.data.local import LocalSettings
from medflare.federation.local.loop import run_local
from medflare.federation.participant import Participant
from medflare.inference.deployed import plain_message, save_model
from medflare.methods.catalogue import get_method
from medflare.networks.catalogue import initial_network
from medflare.training.opening import open_site
from medflare.training.site import Site

TRAINED_ON = "trained_on"


def notes_of(out: Path) -> dict[str, str]:
    return {Path(row["image"]).name: row["outside_training"] for row in rows_of(out)}


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A federation of volumes and the folder of its run."""
    root = make_sites(tmp_path_factory.mktemp("volumes"), ("A", "BB"))
    out = tmp_path_factory.mktemp("run")
    results = run_local("fedavg", TASK, ["A", "BB"], rounds=1, seed=0, data_root=root, out=out)
    assert results["status"] == "COMPLETED", results["reason"]
    return root, out


def test_every_card_has_the_range_of_the_training_images(volumes: tuple[Path, Path]) -> None:
    root, run = volumes
    cards = [json.loads(card.read_text())[TRAINED_ON] for card in sorted(run.rglob("card.json"))]
    assert len(cards) >= 3
    for card in cards:
        assert card == cards[0]
    training = sum(
        len(json.loads((root / site / "datalist.json").read_text())["training"])
        for site in ("A", "BB")
    )
    assert cards[0]["images"] == training and len(cards[0]["medians"][0]) == 2


def changed(
    source: Path, folder: Path, name: str, change: Callable[[Any], Any], spacing: float = 1.0
) -> None:
    """Both channels of a patient with other values or another spacing."""
    for channel in TASK["channels"]:
        image: Any = nibabel.load(source / f"p0_{channel}.nii.gz")
        affine = image.affine @ np.diag([spacing, spacing, spacing, 1])
        folder.mkdir(exist_ok=True)
        nibabel.save(
            nibabel.Nifti1Image(change(image.get_fdata()).astype(np.float32), affine),
            folder / f"{name}_{channel}.nii.gz",
        )


def test_unlike_volumes_are_named_and_the_sites_test_volumes_are_not(
    volumes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = volumes
    model = run / "sites/A/deployed"
    images = tmp_path / "images"
    entries = json.loads((root / "A/datalist.json").read_text())["test"]
    images.mkdir()
    for entry in entries:
        for file in entry["image"]:
            (images / file).symlink_to(root / "A" / file)
    command = ["predict", str(model), str(images), "--out", str(tmp_path / "within"), "--strict"]
    assert main(command) == 0
    assert set(notes_of(tmp_path / "within").values()) == {""}
    assert "outside" not in capsys.readouterr().err

    changed(root / "A", images, "coarse", lambda values: values, spacing=3)
    changed(root / "A", images, "wide", lambda values: np.tile(values, (3, 3, 3)))
    changed(root / "A", images, "bright", lambda values: values + 5000)
    changed(root / "A", images, "scaled", lambda values: values / 255)
    named = {
        "coarse": "spacing",
        "wide": "field of view",
        "bright": "intensities",
        "scaled": "intensities",
    }
    assert main(["predict", str(model), str(images), "--out", str(tmp_path / "all")]) == 0
    actual = notes_of(tmp_path / "all")
    odd = {name: text for name, text in actual.items() if text}
    assert len(odd) == 4 and len(actual) == 4 + len(entries)
    for name, text in odd.items():
        assert named[name.partition("_")[0]] in text
    printed = capsys.readouterr()
    for name in named:
        assert f"{name}_" in printed.err
    assert f"4 of {len(actual)} images" in printed.out

    assert main([*command[:3], "--out", str(tmp_path / "strict"), "--strict"]) == 1
    printed = capsys.readouterr()
    for name in named:
        assert f"{name}_" in printed.err
    assert "4 failed" in printed.out
    assert len(notes_of(tmp_path / "strict")) == len(entries)
    assert not list((tmp_path / "strict").rglob("wide*"))


def test_pictures_in_colour_are_named(
    trained: Runs, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task resizes pictures: another size in pixels is not named."""
    model = trained("fedavg") / "models/global"
    images = tmp_path / "images"
    images.mkdir()
    pixels = np.asarray(Image.open(data_root / "A/test/0.png"))
    Image.fromarray(pixels).save(images / "own.png")
    Image.fromarray(np.kron(pixels, np.ones((4, 4), np.uint8))).save(images / "large.png")
    Image.fromarray(np.dstack([pixels, pixels // 3, pixels // 4])).save(images / "red.png")
    assert main(["predict", str(model), str(images), "--out", str(tmp_path / "out")]) == 0
    actual = notes_of(tmp_path / "out")
    assert (
        actual["own.png"] == ""
        and "size" not in actual["large.png"]
        and "colour" in actual["red.png"]
    )
    capsys.readouterr()


@pytest.mark.parametrize("coloured", [True, False])
def test_a_grey_volume_is_refused_by_a_model_of_pictures_in_colour(
    coloured: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = small_task(channels=3)
    ends: Any = [[0.0] * 3, [255.0] * 3]
    trained_on = {
        "images": 9,
        "sides": [[16, 16], [16, 16]],
        "spacing": None,
        "extent": None,
        "medians": ends,
        "contrasts": ends,
    }
    model = tmp_path / "model"
    save_model(
        model,
        task,
        plain_message(initial_network(task, 0).state_dict()),
        {TRAINED_ON: {**trained_on, "coloured": [coloured]}},
    )
    images = tmp_path / "images"
    images.mkdir()
    grey = np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype(np.uint8)
    nibabel.save(nibabel.Nifti1Image(grey.astype(np.float32), np.eye(4)), images / "brain.nii.gz")
    Image.fromarray(grey).save(images / "eye.png")
    command = ["predict", str(model), str(images), "--out"]
    assert main([*command, str(tmp_path / "out")]) == int(coloured)
    assert ("--force" in capsys.readouterr().err) == coloured
    assert set(notes_of(tmp_path / "out")) == (
        {"eye.png"} if coloured else {"eye.png", "brain.nii.gz"}
    )
    assert main([*command, str(tmp_path / "forced"), "--force"]) == 0
    assert set(notes_of(tmp_path / "forced")) == {"eye.png", "brain.nii.gz"}


def test_a_card_without_training_range_is_reported_and_refused_when_strict(
    untrained: Models, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "predict",
        str(untrained()),
        str(data_root / "A/test"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 0
    assert "unknown" in capsys.readouterr().out
    assert "outside_training" not in (tmp_path / "out/predictions.csv").read_text()
    assert main([*command, "--strict"]) == 1
    assert "--strict" in capsys.readouterr().err


def test_a_site_with_dp_noise_sends_no_image_range(data_root: Path) -> None:
    """Eight training images are of four patients at every site."""
    task = small_task(label_values={"square": [3, 4]})
    cards = {}

    def opened(role: str) -> Site:
        return open_site("A", task, role=role, data_root=data_root)

    for minimum, hyper in (
        (0, {}),
        (4, {}),
        (1, {"site": {"dp_noise": 1.0, "dp_clip": 1.0, "dp_delta": 1e-5}}),
    ):
        site = Participant(
            "A", opened, get_method("fedavg"), hyper, local=LocalSettings(minimum_patients=minimum)
        )
        cards[minimum] = site.reply(
            "enrol", 0, Message({}, {"role": "inside", "sites": ["A"]})
        ).meta
    assert [TRAINED_ON in cards[minimum] for minimum in (0, 4, 1)] == [True, True, False]
    assert cards[4][TRAINED_ON]["medians"] != cards[0][TRAINED_ON]["medians"]
