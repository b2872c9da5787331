"""A task that is proposed fits the images that it was proposed for, and says why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.downloaded_folders import classes, mask, pairs, picture, table
from helpers.forked_trial import fork_trials
from helpers.volume_sites import change, cube_task, dicom_series, enhanced_series, write
from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import DatalistItem
from medflare.data.reading import Stored
from medflare.preparation import proposing
from medflare.preparation.check import check_site
from medflare.preparation.dataset_import.datalists import import_folder
from medflare.preparation.dataset_import.options import Columns, ImportOptions
from medflare.preparation.planning import ProposedTask
from medflare.preparation.proposing import TaskHints, propose, summarise
from medflare.tasks.config import TaskConfig, load_task


@pytest.fixture(autouse=True)
def _forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_trials(monkeypatch)


def proposed(
    root: Path, options: ImportOptions | None = None, **answers: Any
) -> tuple[TaskConfig, ProposedTask]:
    """The task for a downloaded folder, which its own check accepts."""
    import_folder(root, options or ImportOptions())
    plan = propose(root, TaskHints(**answers))
    task = load_task(plan.settings)
    report = check_site(root, task)
    assert report.ok, report.render()
    return task, plan


def test_classes_by_their_folders(tmp_path: Path) -> None:
    task, plan = proposed(classes(tmp_path / "Chest X-rays", patients=8))
    assert (task.name, task.kind, task.target, task.labels) == (
        "chest_x_rays",
        "classification",
        "multiclass",
        ("cat", "dog"),
    )
    assert (task.channels, task.size, task.network["name"]) == (1, (16, 16), "small_cnn")
    assert (task.intensity["b_min"], task.intensity["b_max"]) == (-1.0, 1.0), "around 0"
    for choice in plan.choices:
        assert choice.reason
    assert next(
        choice.reason for choice in plan.choices if choice.setting == "sampling"
    ).startswith("dog is shown "), "both are named"
    assert (
        'labels: ["cat", "dog"]\n    names from the datalist' in plan.render()
        and "nnU-Net" not in plan.render()
    )


@pytest.mark.parametrize(
    ("names", "graded"),
    [("0123", True), ("123", True), ("0134", False), ("abc", False), ("01", False)],
)
def test_numbered_grades_get_the_kappa_that_weighs_distances(
    names: str, graded: bool, tmp_path: Path
) -> None:
    for seed in range(10 * len(names)):
        name = names[seed // 10]
        picture(tmp_path / name / f"{name}-{seed}.png", seed=seed)
    task, _ = proposed(tmp_path)
    assert ("quadratic_kappa" in task.test_metrics) == graded and {"accuracy", "auc_macro"} <= {
        *task.test_metrics
    }


def test_a_rare_class_is_drawn_as_often_as_the_others(tmp_path: Path) -> None:
    for n in range(30):
        picture(tmp_path / ("rare" if n < 5 else "common") / f"{n}.png", channels=3, seed=n)
    task, _ = proposed(tmp_path)
    assert task.sampling.name == "balanced" and task.channels == 3


def test_grey_pictures_saved_as_colour_have_one_channel(tmp_path: Path) -> None:
    for file in classes(tmp_path, patients=6).rglob("*.png"):
        Image.open(file).convert("RGB").save(file)
    assert proposed(tmp_path)[0].channels == 1


def test_channels_of_another_distributions_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    five = Stored(np.arange(5.0)[:, None, None] * np.ones((5, 16, 16)))
    monkeypatch.setattr(proposing, "read_stored", lambda file: five)
    entry = DatalistItem(tmp_path / "0.five", 0, "0", "training", "A")
    assert proposing._stored_shape(entry) == (5, 2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1,), ("binary", ("foreground",), {})),
        ((255,), ("binary", ("foreground",), {"foreground": [255]})),
        ((1, 2), ("multiclass", ("background", "structure_1", "structure_2"), {})),
        (
            (3, 7),
            (
                "multiclass",
                ("background", "structure_3", "structure_7"),
                {"structure_3": [3], "structure_7": [7], "background": [0]},
            ),
        ),
    ],
)
def test_structures_by_the_values_of_masks(
    values: tuple[int, ...], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    task, _ = proposed(pairs(tmp_path, values=values))
    assert (task.target, task.labels, task.label_values) == expected
    assert (task.network["name"], task.image_mode) == ("unet", "resize")


def test_masks_of_0_and_255_beside_masks_of_0_and_1(tmp_path: Path) -> None:
    root = pairs(tmp_path, values=(1,))
    for number, path in enumerate(sorted(root.rglob("*_mask.png"))):
        if number % 2:
            Image.fromarray(np.asarray(Image.open(path)) * np.uint8(255)).save(path)
    task, _ = proposed(root)
    assert (task.target, task.labels, task.label_values) == ("binary", ("foreground",), {})


@pytest.mark.parametrize(("structures", "names"), [((0, 128), ("cup", "rim")), ((0,), ("lesion",))])
def test_the_background_is_what_the_corners_of_masks_show(
    structures: tuple[int, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    """As in REFUGE, where the background is 255."""
    for number in range(10):
        picture(tmp_path / "images" / f"{number}.png", seed=number)
        pixels = np.full((16, 16), 255, np.uint8)
        for row, value in enumerate(structures):
            pixels[4 + 4 * row : 8 + 4 * row, 4:10] = value
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "masks" / f"{number}.png")
    task, _ = proposed(tmp_path, labels=names)
    assert task.target == "multiclass" and task.labels == ("background", *names)
    assert task.label_values == {
        "background": [255],
        **{name: [value] for name, value in zip(names, structures, strict=True)},
    }


def test_hints_are_used(tmp_path: Path) -> None:
    task, plan = proposed(
        pairs(tmp_path, values=(1, 2)), name="eyes", labels=("disc", "cup"), size=(32, 16)
    )
    assert (task.name, task.labels, task.size, task.image_mode) == (
        "eyes",
        ("background", "disc", "cup"),
        (32, 16),
        "resize",
    )
    assert task.network == {"name": "unet", "channels": [8, 16, 32, 64], "norm": "instance"}
    assert sum(choice.setting == "size" for choice in plan.choices) == 1
    assert load_task(
        propose(tmp_path, TaskHints(network="SegResNet", size=(16, 16))).settings
    ).network == {"name": "SegResNet"}


@pytest.mark.parametrize("given", [(), ("cat", "dog")])
def test_classes_that_are_numbered_from_1_have_no_class_0(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    import_folder(classes(tmp_path), ImportOptions())
    file = tmp_path / "datalist.json"
    content = json.loads(file.read_text())
    content["labels"] = {"1": "cat", "2": "dog"}
    for split in ("training", "validation", "test"):
        for item in content[split]:
            item["label"] += 1
    file.write_text(json.dumps(content))
    settings = summarise(tmp_path, TaskHints(labels=given)).settings
    assert settings["labels"] == ["cat", "dog"]
    assert settings["label_values"] == {"cat": [1], "dog": [2]}


def test_one_class_may_be_renamed(tmp_path: Path) -> None:
    task, _ = proposed(classes(tmp_path / "a"), labels=("cat", "hound"))
    assert task.label_values == {"cat": [0], "hound": [1]}
    assert "another name in the task: 1 dog as 1 hound" in check_site(tmp_path / "a", task).render()
    for names in (("cat", "dog"), ("cat", "dog", "horse")):
        assert not proposed(tmp_path / "a", ImportOptions(force=True), labels=names)[0].label_values
    (pairs(tmp_path / "b", values=(1, 2)) / "dataset.json").write_text(
        json.dumps({"labels": {"0": "background", "1": "disc", "2": "cup"}})
    )
    task, _ = proposed(tmp_path / "b", labels=("disc", "pit"), size=(16, 16))
    assert task.label_values == {"background": [0], "disc": [1], "pit": [2]}


def test_labels_and_values_of_masks_must_agree(tmp_path: Path) -> None:
    """A rare value among many masks: the names were given to those that were seen, in their order."""
    import_folder(pairs(tmp_path, values=(2,)))
    with pytest.raises(ConfigError, match="--labels rim,cup"):
        propose(tmp_path, TaskHints(labels=("rim", "cup")))
    (tmp_path / "dataset.json").write_text(
        json.dumps({"labels": {"0": "background", "1": "rim", "2": "cup"}})
    )
    import_folder(tmp_path, ImportOptions(force=True))
    task = load_task(propose(tmp_path, TaskHints(labels=("rim", "cup"), size=(16, 16))).settings)
    assert (task.target, task.labels, task.label_values) == (
        "multiclass",
        ("background", "rim", "cup"),
        {},
    )


def test_sites_that_number_structures_differently(tmp_path: Path) -> None:
    named = {"0": "background", "1": "cup", "2": "disc"}
    for site, labels in {"a": named, "b": {"background": 0, "disc": 1, "cup": 2}}.items():
        import_folder(pairs(tmp_path / site), ImportOptions())
        file = tmp_path / site / "datalist.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"labels": labels}))
    with pytest.raises(ConfigError, match=r"1 disc, 2 cup, a 0 background, .*; renumber its masks"):
        summarise(tmp_path, TaskHints())


def _one_image(root: Path, entry: dict[str, Any], **more: Any) -> Path:
    """A datalist of one entry, whose files are there."""
    pairs(root, images=1)
    (root / "datalist.json").write_text(json.dumps({"training": [entry], **more}))
    return root


@pytest.mark.parametrize(
    "label", [["IMG_00_mask.png", "IMG_00_mask.png"], [0, 1]], ids=["masks", "findings"]
)
def test_as_many_names_as_an_image_has_masks_or_findings(label: list[Any], tmp_path: Path) -> None:
    root = _one_image(tmp_path, {"image": "IMG_00.png", "label": label})
    assert summarise(root, TaskHints(labels=("a", "b"))).settings["labels"] == ["a", "b"]
    for names in (("a",), ("a", "b", "c")):
        with pytest.raises(ConfigError, match=f"--labels {','.join(names)}"):
            summarise(root, TaskHints(labels=names))


CHANNEL_FILES = {"image": ["IMG_00.png", None], "label": "IMG_00_mask.png"}


@pytest.mark.parametrize(
    ("names", "channels"),
    [
        ({"0": "T1", "1": "T2"}, ["T1", "T2"]),
        (["T1"], ["T1", "channel_1"]),
        (None, ["channel_0", "channel_1"]),
        ([["T1"]], None),
    ],
)
def test_names_of_channels_in_separate_files(
    names: Any, channels: list[str] | None, tmp_path: Path
) -> None:
    root = _one_image(tmp_path, CHANNEL_FILES, channel_names=names)
    if channels is None:
        with pytest.raises(DataError, match="channel_names"):
            summarise(root, TaskHints())
        return
    assert summarise(root, TaskHints(channels=2)).settings["channels"] == channels
    with pytest.raises(ConfigError, match="--channels 7"):
        summarise(root, TaskHints(channels=7))


def test_volumes_with_named_channels(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for folder in ("imagesTr", "labelsTr"):
        (tmp_path / folder).mkdir()
    for case in range(5):
        for channel in range(2):
            write(
                tmp_path / "imagesTr" / f"c{case}_{channel:04}.nii.gz",
                random.uniform(0, 9, (16, 16, 16)).astype(np.float32),
                np.eye(4),
            )
        drawn = np.zeros((16, 16, 16), np.uint8)
        drawn[4:9, 4:9, 4:9] = 1
        write(tmp_path / "labelsTr" / f"c{case}.nii.gz", drawn, np.eye(4))
    (tmp_path / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "T2", "1": "ADC"}, "labels": {"background": 0, "PZ": 1}})
    )
    task, _ = proposed(tmp_path)
    assert (task.spatial_dims, task.channels, task.labels, task.label_values) == (
        3,
        ("T2", "ADC"),
        ("PZ",),
        {},
    )
    assert task.intensity["name"] == "NormalizeIntensity"


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"labels": ("disc",)}, "--labels disc"),
        ({"labels": ("disc", "cup", "rim")}, "--labels disc,cup,rim"),
        ({"labels": ("disc", "disc")}, "--labels disc,disc"),
        ({"size": (8,)}, "--size"),
    ],
)
def test_hints_that_do_not_fit_are_errors(
    answers: dict[str, Any], named: str, tmp_path: Path
) -> None:
    import_folder(pairs(tmp_path, values=(1, 2)))
    with pytest.raises(ConfigError, match=named):
        propose(tmp_path, TaskHints(**answers))


def test_files_that_are_not_masks_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="datalist"):
        propose(pairs(tmp_path / "a"), TaskHints())
    soft = pairs(tmp_path / "soft")
    for number, file in enumerate(soft.glob("*_mask.png")):
        picture(file, 40 + 20 * number)  # many grey levels
    import_folder(soft)
    with pytest.raises(DataError, match="mask"):
        propose(soft, TaskHints())
    empty = pairs(tmp_path / "empty", values=())
    import_folder(empty)
    with pytest.raises(DataError, match="10 masks"):
        propose(empty, TaskHints())


def test_frames_without_positions_are_pictures(tmp_path: Path) -> None:
    """A film of ultrasound; frames at several heights are a volume."""
    for heights, dims in (((30, 30, 30, 30), 2), ((30, 32, 34, 36), 3)):
        root = tmp_path / str(dims)
        for number in range(10):
            folder = root / "ab"[number % 2]
            enhanced_series(folder / f"{number}.dcm", heights=heights)
            change(folder, [number], PatientID=f"p{number}", SeriesInstanceUID=f"1.2.{number}")
        import_folder(root)
        assert summarise(root, TaskHints()).settings["spatial_dims"] == dims


def test_sites_with_different_labels_are_errors(tmp_path: Path) -> None:
    import_folder(classes(tmp_path / "A"))
    import_folder(classes(tmp_path / "B", names=("cat", "horse")))
    with pytest.raises(ConfigError, match="labels"):
        propose(tmp_path, TaskHints())


def test_structures_of_dicom_segmentation_objects(tmp_path: Path) -> None:
    """An object has frames for the slices that show a structure alone."""
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    from medflare.inference.dicom_seg import dicom_seg

    listed: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "test": []}
    task = cube_task(channels=1)
    for number in range(5):
        series = dicom_series(tmp_path / f"ct{number}")
        drawn = np.zeros((5, 6, 4), bool)
        drawn[1:3, 2:5, [0, 1, 3]] = True
        content = dicom_seg(series, {"liver": drawn}, task)
        (tmp_path / f"seg{number}.dcm").write_bytes(content)
        split = ("training", "training", "training", "validation", "test")[number]
        item = {"image": f"ct{number}", "label": f"seg{number}.dcm", "patient": f"p{number}"}
        listed[split].append(item)
    (tmp_path / "datalist.json").write_text(json.dumps({"labels": {"1": "liver"}, **listed}))
    settings = summarise(tmp_path, TaskHints()).settings
    assert (settings["kind"], settings["labels"]) == ("segmentation", ["liver"])
    overlapping = cube_task(channels=1, target="multilabel", labels=("liver", "tumour"))
    for number in range(5):
        both = {"liver": drawn, "tumour": drawn}
        content = dicom_seg(tmp_path / f"ct{number}", both, overlapping)
        (tmp_path / f"seg{number}.dcm").write_bytes(content)
    header = {"labels": {"1": "liver", "2": "tumour"}}
    (tmp_path / "datalist.json").write_text(json.dumps({**header, **listed}))
    settings = summarise(tmp_path, TaskHints()).settings
    assert (settings["target"], settings["labels"]) == ("multilabel", ["liver", "tumour"])


def test_the_only_structure_has_the_name_of_its_folder_or_column(tmp_path: Path) -> None:
    for site, name in (("A", "vessels"), ("B", "vessels"), ("C", "drusen")):
        for number in range(6):
            picture(tmp_path / site / "images" / f"{number}.png", 100 + number)
            mask(tmp_path / site / name / f"{number}.png", values=(255,))
    folders = ImportOptions(site_folders=True)
    import_folder(tmp_path, folders)
    assert settings_of(tmp_path)["labels"] == ["foreground"], "sites differ"
    (tmp_path / "C/drusen").rename(tmp_path / "C/vessels")
    import_folder(tmp_path, replace(folders, force=True))
    settings = settings_of(tmp_path)
    assert (settings["labels"], settings["label_values"]) == (["vessels"], {"vessels": [255]})
    rows = [(f"images/{number}.png", f"drusen/{number}.png") for number in range(6)]
    root = tmp_path / "A"
    (root / "vessels").rename(root / "drusen")
    table(root / "images.csv", ("image", "optic_disc_mask"), *rows)
    import_folder(root, ImportOptions(columns=Columns(mask="optic_disc_mask"), force=True))
    assert settings_of(root)["labels"] == ["optic_disc"]


def settings_of(root: Path) -> dict[str, Any]:
    return dict(summarise(root, TaskHints()).settings)


@pytest.mark.parametrize("dims", [2, 3])
def test_images_of_a_classification_are_mirrored_from_left_to_right(
    dims: int, tmp_path: Path
) -> None:
    for number in range(8):
        if dims == 2:
            picture(tmp_path / "ab"[number % 2] / f"{number}.png", seed=number)
            continue
        volume = np.random.default_rng(number).random((16, 16, 16)).astype(np.float32)
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        write(folder / f"{number}.nii", volume, np.eye(4))
    task, _ = proposed(tmp_path)
    (flip,) = (step for step in task.augment if step["name"] == "RandFlip")
    if dims == 3:
        # From left to right in the task's orientation.
        assert task.orientation[flip["spatial_axis"]] in "LR"
    else:
        assert flip["spatial_axis"] == 1, "columns"
