"""`predict` names the images that lie outside what a model was trained on."""

import csv
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
from medflare.cli import main
from medflare.core.message import Message
from medflare.federation.local.loop import run_local
from medflare.federation.participant import Participant
from medflare.methods.catalogue import get_method
from medflare.training.opening import open_site
from medflare.training.site import Site

TOLD = "trained_on"


def rows_of(out: Path) -> dict[str, str]:
    with (out / "predictions.csv").open() as file:
        return {Path(row["image"]).name: row["outside_training"] for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A federation of volumes and the folder of its run."""
    root = make_sites(tmp_path_factory.mktemp("volumes"), ("A", "BB"))
    out = tmp_path_factory.mktemp("run")
    results = run_local("fedavg", TASK, ["A", "BB"], rounds=1, seed=0, data_root=root, out=out)
    assert results["status"] == "COMPLETED", results["reason"]
    return root, out


def test_every_card_says_what_the_model_was_trained_on(volumes: tuple[Path, Path]) -> None:
    root, run = volumes
    cards = sorted(run.rglob("card.json"))
    told = [json.loads(card.read_text())[TOLD] for card in cards]
    assert len(cards) >= 3 and all(one == told[0] for one in told)
    training = sum(len(json.loads((root / site / "datalist.json").read_text())["training"]) for site in ("A", "BB"))
    assert told[0]["images"] == training and len(told[0]["medians"][0]) == 2


def changed(source: Path, folder: Path, name: str, change: Callable[[Any], Any], spacing: float = 1.0) -> None:
    """Both channels of a patient with other values or another spacing."""
    for channel in TASK["channels"]:
        image: Any = nibabel.load(source / f"p0_{channel}.nii.gz")
        affine = image.affine @ np.diag([spacing, spacing, spacing, 1])
        folder.mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(change(image.get_fdata()).astype(np.float32), affine), folder / f"{name}_{channel}.nii.gz")


def test_volumes_of_another_kind_are_named_and_the_sites_own_are_not(
    volumes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = volumes
    model, images = run / "sites/A/deployed", tmp_path / "images"
    entries = json.loads((root / "A/datalist.json").read_text())["test"]
    images.mkdir()
    for entry in entries:
        for file in entry["image"]:
            (images / file).symlink_to(root / "A" / file)
    command = ["predict", str(model), str(images), "--out", str(tmp_path / "within"), "--strict"]
    assert main(command) == 0
    assert set(rows_of(tmp_path / "within").values()) == {""}
    assert "outside" not in capsys.readouterr().err

    changed(root / "A", images, "coarse", lambda values: values, spacing=3)
    changed(root / "A", images, "wide", lambda values: np.tile(values, (3, 3, 3)))
    changed(root / "A", images, "bright", lambda values: values + 5000)
    changed(root / "A", images, "scaled", lambda values: values / 255)
    assert main(["predict", str(model), str(images), "--out", str(tmp_path / "all")]) == 0
    found = rows_of(tmp_path / "all")
    odd = {name: text for name, text in found.items() if text}
    assert len(odd) == 4 and len(found) == 4 + len(entries)
    (coarse,), (wide,), (bright,), (scaled,) = (
        [odd[n] for n in odd if n.startswith(name)] for name in ("coarse", "wide", "bright", "scaled")
    )
    assert "spacing" in coarse and "field of view" in wide and "mm" in wide and "intensities" in bright and "intensities" in scaled
    said = capsys.readouterr()
    assert all(f"{name}_" in said.err for name in ("coarse", "wide", "bright", "scaled")) and f"4 of {len(found)} images" in said.out

    assert main([*command[:3], "--out", str(tmp_path / "strict"), "--strict"]) == 1
    said = capsys.readouterr()
    assert all(f"{name}_" in said.err for name in ("coarse", "wide", "bright", "scaled")) and "4 failed" in said.out
    assert len(rows_of(tmp_path / "strict")) == len(entries)
    assert not list((tmp_path / "strict").rglob("wide*")), "what was not asked for is not predicted"


def test_pictures_of_another_size_and_in_colour_are_named(
    trained: Callable[..., Path], data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, images = trained("fedavg") / "models/global", tmp_path / "images"
    images.mkdir()
    pixels = np.asarray(Image.open(data_root / "A/test/0.png"))
    Image.fromarray(pixels).save(images / "own.png")
    Image.fromarray(np.kron(pixels, np.ones((4, 4), np.uint8))).save(images / "large.png")
    Image.fromarray(np.dstack([pixels, pixels // 3, pixels // 4])).save(images / "red.png")
    assert main(["predict", str(model), str(images), "--out", str(tmp_path / "out")]) == 0
    found = rows_of(tmp_path / "out")
    assert found["own.png"] == "" and "size" in found["large.png"] and "colour" in found["red.png"]
    capsys.readouterr()


def test_a_card_that_does_not_say_is_said_and_refused_when_strict(
    untrained: Callable[..., Path], data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", str(untrained()), str(data_root / "A/test"), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "nothing is known" in capsys.readouterr().out
    assert "outside_training" not in (tmp_path / "out/predictions.csv").read_text()
    assert main([*command, "--strict"]) == 1
    assert "--strict" in capsys.readouterr().err


def test_a_site_of_few_patients_and_one_with_noise_tell_nothing_of_their_images(data_root: Path) -> None:
    """Eight training images are of four patients at every site."""
    task, told = small_task(label_values={"square": [3, 4]}), {}

    def opened(role: str) -> Site:
        return open_site("A", task, role=role, data_root=data_root)

    for minimum, hyper in ((0, {}), (4, {}), (5, {}), (1, {"site": {"dp_noise": 1.0, "dp_clip": 1.0, "dp_delta": 1e-5}})):
        site = Participant("A", opened, get_method("fedavg"), hyper, minimum_patients=minimum)
        told[minimum] = site.answer("enrol", 0, Message({}, {"role": "inside", "sites": ["A"]})).meta
    assert [TOLD in told[minimum] for minimum in (0, 4, 5, 1)] == [True, True, False, False]
    assert told[4][TOLD]["medians"] != told[0][TOLD]["medians"]
