import json
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import torch

from helpers.small_tasks import SEGMENTATION as SLICES
from helpers.small_tasks import predicted, score
from helpers.volume_sites import (
    PATCHES,
    SHAPE,
    affine,
    change,
    cube_task,
    dicom_series,
    enhanced_series,
    make_sites,
    write,
)
from inference.conftest import Answer, rows_of
from medflare.core import packages
from medflare.core.errors import ConfigError, DataError
from medflare.data.decoding import Source
from medflare.federation.local.loop import run_local
from medflare.inference.deployed import StoredModel, load_model, plain_message
from medflare.inference.dicom_seg import dicom_seg
from medflare.inference.export import export
from medflare.inference.inputs import find_inputs
from medflare.inference.predict import PredictionSummary, fit, predict, predictions, prepare
from medflare.methods.catalogue import build_deployed, get_method, method_names
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.opening import open_site


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sites(tmp_path_factory.mktemp("volumes"), ("A", "BB", "O"))


OUTSIDE: dict[str, dict[str, Any]] = {
    "iop_fl": {"route_epochs": 1, "radius": 1},
    "grace": {"client": "erm", "tta": "dsbn"},
}
QUICK: dict[str, dict[str, Any]] = {
    "fedsm_extra": {"combine": "ensemble", "selector_rounds": 1},
    "feddag": {"warmup": 0, "generator_width": 2},
}
# Every kind of final model.
METHODS = ["fedavg", *(name for name in method_names() if get_method(name).models)]
CASES = [*((method, "A") for method in METHODS), *((method, "O") for method in OUTSIDE)]


@pytest.mark.parametrize(("method", "site"), CASES)
def test_volumes_larger_than_a_patch_give_the_numbers_of_the_run(
    method: str, site: str, root: Path, tmp_path: Path
) -> None:
    options = OUTSIDE[method] if site == "O" else QUICK.get(method, {})
    task = load_task({**PATCHES, "size": [8, 8, 4]})
    outside = [site] if site == "O" else []
    results = run_local(
        method,
        task,
        ["A", "BB"],
        outside=outside,
        rounds=1,
        seed=0,
        data_root=root,
        out=tmp_path / "run",
        **options,
    )
    stored = load_model(tmp_path / "run/sites" / site / "deployed")
    listed = json.loads((root / site / "datalist.json").read_text())["test"]
    images = []
    for entry in listed:
        for name in entry["image"]:
            images.append(root / site / name)
    inputs, problems = find_inputs(images, tmp_path / "out", task.channel_names)
    assert not problems
    assert [(source.name, len(source.channels)) for source in inputs] == [("p5", 2), ("p6", 2)]
    prepared = [prepare(source, task) for source in inputs]
    model: Any = stored.build(build_deployed).eval()
    if hasattr(model, "adapt"):
        fit(model, prepared, task, "cpu", stored.kind)
    actual = [prediction.probabilities[0] for prediction in predictions(model, prepared, task)]
    place = open_site(site, task, data_root=root)
    expected = predicted(place, build_deployed(task, stored.message), "test")
    for first, second in zip(actual, expected, strict=True):
        assert torch.equal(first, second)
    data = place.data.test
    measured = score(actual, data.targets, data.patients, task, ["dice"], data.spacings)
    assert measured.values["dice"] == results["sites"][site]["metrics"]["deployed"]["dice"]


def bright(task: TaskConfig, images: list[Path], out: Path, seg: bool = False) -> PredictionSummary:
    """Prediction by a model whose foreground is where the first channel, scaled to 0 to 1, is bright."""
    model = Answer(lambda images: (images[:, :1] > 0.5).float())
    return predict(
        StoredModel(task, plain_message({}), {}),
        images,
        out,
        builder=lambda task, message: model,
        seg=seg,
    )


@pytest.mark.parametrize("codes", ["RAS", "LIP"])
@pytest.mark.parametrize("spacing", [None, [1.0, 1.0, 1.0]])
def test_masks_lie_on_the_grid_of_the_file(
    codes: str, spacing: list[float] | None, tmp_path: Path
) -> None:
    task = cube_task(image_mode="patch", channels=1, orientation="ASL", spacing=spacing)
    volume = np.zeros(SHAPE, np.float32)
    volume[2:7, 3:9, 4:8] = 100
    write(tmp_path / "scan.nii.gz", volume, affine(codes))
    summary = bright(task, [tmp_path / "scan.nii.gz"], tmp_path / "out")
    assert summary.images == 1 and not summary.failed
    mask = nibabel.load(tmp_path / "out/scan_seg.nii.gz")
    np.testing.assert_array_equal(mask.affine, affine(codes))
    actual = np.asarray(mask.dataobj) == 1
    if spacing is None:
        np.testing.assert_array_equal(actual, volume > 0)
    else:
        assert 2 * (actual & (volume > 0)).sum() / (actual.sum() + (volume > 0).sum()) > 0.9
    (row,) = rows_of(tmp_path / "out")
    assert row["voxels_cube"] == str(actual.sum()) and float(row["ml_cube"]) == pytest.approx(
        actual.sum() * 6 / 1000
    )


def test_a_resized_prediction_comes_back_to_the_volumes_size(tmp_path: Path) -> None:
    volume = np.zeros((16, 16, 16), np.float32)
    volume[4:12, 4:12, 8:] = 100
    write(tmp_path / "scan.nii", volume, affine("PSR"))
    bright(cube_task(channels=1), [tmp_path / "scan.nii"], tmp_path / "out")
    actual = np.asarray(nibabel.load(tmp_path / "out/scan_seg.nii.gz").dataobj) == 1
    assert (
        actual.shape == volume.shape
        and 2 * (actual & (volume > 0)).sum() / (actual.sum() + (volume > 0).sum()) > 0.95
    )


def test_channels_are_found_by_their_names_and_a_missing_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("P1_pre", "P1_flair", "P2-flair", "P3"):
        write(tmp_path / f"in/{name}.nii.gz", np.ones(SHAPE, np.float32))
    inputs, _ = find_inputs([tmp_path / "in"], tmp_path / "out", ("pre", "flair"))
    actual = {}
    for source in inputs:
        actual[source.name] = [file and file.name for file in source.channels]
    assert actual == {
        "P1": ["P1_pre.nii.gz", "P1_flair.nii.gz"],
        "P2": [None, "P2-flair.nii.gz"],
        "P3": [],
    }
    summary = bright(cube_task(image_mode="patch"), [tmp_path / "in"], tmp_path / "out")
    assert summary.images == 1 and len(summary.failed) == 2
    for name in ("P2", "P3"):
        assert sum(name in line for line in summary.failed) == 1


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_networks_of_volumes_are_exported(format: str, tmp_path: Path) -> None:
    task = load_task(PATCHES)
    if format == "onnx":
        pytest.importorskip("onnxscript")
    stored = StoredModel(
        task,
        plain_message(initial_network(task, 0).state_dict()),
        {"task": task.to_dict(), "kind": "plain"},
    )
    done = export(stored, format, tmp_path / "out")
    assert done.files and done.difference < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target": "multiclass", "labels": ["background", "cube"]},
        {"image_mode": "resize", "patches_per_image": 1},
        {"image_mode": "resize", "patches_per_image": 1, "size": [20, 12, 16]},
        {"image_mode": "resize", "patches_per_image": 1, "size": [28, 24, 20]},
    ],
    ids=["patches", "classes", "made smaller", "made smaller and larger", "made larger"],
)
def test_a_bundle_of_volumes_predicts_as_medflare_does(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monai import bundle

    task = load_task({**PATCHES, "orientation": "PLS", "spacing": [1.0, 2.0, 2.0], **changes})
    stored = StoredModel(
        task,
        plain_message(initial_network(task, 0).state_dict()),
        {"task": task.to_dict(), "kind": "plain"},
    )
    export(stored, "monai", tmp_path / "bundle")
    (tmp_path / "in").mkdir()
    for name in task.channel_names:
        write(
            tmp_path / f"in/scan_{name}.nii.gz",
            np.random.default_rng(0).random(SHAPE).astype(np.float32),
            affine("LIP"),
        )
    monkeypatch.chdir(tmp_path / "bundle")
    bundle.run(
        config_file="configs/inference.json",
        dataset_dir=str(tmp_path / "in"),
        output_dir=str(tmp_path / "monai"),
    )
    predict(stored, [tmp_path / "in"], tmp_path / "medflare")
    (file,) = (tmp_path / "monai").glob("*.nii.gz")
    ours = nibabel.load(tmp_path / "medflare/scan_seg.nii.gz")
    monais = nibabel.load(file)
    np.testing.assert_allclose(monais.affine, ours.affine, atol=1e-5)
    # Resampled back by another routine.
    assert (np.asarray(ours.dataobj) == np.asarray(monais.dataobj).reshape(SHAPE)).mean() > 0.99


@pytest.mark.parametrize("dims", [2, 3])
def test_a_dicom_series_gets_a_segmentation_object(dims: int, tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    dicom_series(tmp_path / "ct")
    task = (
        cube_task(image_mode="patch", channels=1)
        if dims == 3
        else load_task({**SLICES, "size": [8, 8]})
    )
    for folder in ("first", "second"):
        summary = bright(task, [tmp_path / "ct"], tmp_path / folder, seg=True)
        assert summary.failed == [] and summary.images == 1
    seg = pydicom.dcmread(tmp_path / "first/ct_seg.dcm")
    assert (seg.Modality, seg.PatientID, seg.FrameOfReferenceUID) == ("SEG", "p", "1.2.4")
    assert [str(segment.SegmentLabel) for segment in seg.SegmentSequence] == list(task.labels)
    assert seg.SOPInstanceUID == pydicom.dcmread(tmp_path / "second/ct_seg.dcm").SOPInstanceUID
    bright(task, [tmp_path / "ct"], tmp_path / "nifti")
    mask = np.asarray(nibabel.load(tmp_path / "nifti/ct_seg.nii.gz").dataobj)
    places = [
        float(frame.PlanePositionSequence[0].ImagePositionPatient[2])
        for frame in seg.PerFrameFunctionalGroupsSequence
    ]
    frames = seg.pixel_array.reshape(-1, 6, 5)
    for frame, height in zip(frames, places, strict=True):
        np.testing.assert_array_equal(frame, mask[:, :, round((height - 30) / 2)].T)
    assert mask.any() and frames.sum() == mask.sum()


def test_structures_have_the_codes_and_colours_of_the_task(tmp_path: Path) -> None:
    highdicom = pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    change(
        dicom_series(tmp_path / "ct"), SpecificCharacterSet="ISO_IR 100", PatientName="Müller^Jörg"
    )
    category = {
        "value": "49755003",
        "scheme": "SCT",
        "meaning": "Morphologically Abnormal Structure",
    }
    codes: dict[str, Any] = {
        "liver": {"value": "10200004", "scheme": "SCT", "meaning": "Liver", "color": "#dd8265"},
        "tumour": {"value": "108369006", "meaning": "Neoplasm", "category": category},
    }
    labels = ["liver", "tumour", "脾臓"]
    task = cube_task(
        image_mode="patch", channels=1, target="multilabel", labels=labels, codes=codes
    )
    bright = [np.zeros((5, 6, 4), bool) for _ in labels]
    bright[0][1:3, 2:4] = bright[2][4] = True
    (tmp_path / "seg.dcm").write_bytes(
        dicom_seg(tmp_path / "ct", dict(zip(labels, bright, strict=True)), task)
    )
    seg = highdicom.seg.segread(tmp_path / "seg.dcm")
    liver, tumour, spleen = seg.SegmentSequence
    assert [
        str(segment.SegmentLabel) for segment in (liver, tumour, spleen)
    ] == labels and seg.PatientName == "Müller^Jörg"
    kinds = [segment.SegmentedPropertyTypeCodeSequence[0] for segment in (liver, tumour, spleen)]
    expected = [("10200004", "SCT"), ("108369006", "SCT"), ("脾臓", "99MEDFLARE")]
    assert [(kind.CodeValue, kind.CodingSchemeDesignator) for kind in kinds] == expected
    categories = [
        segment.SegmentedPropertyCategoryCodeSequence[0].CodeValue
        for segment in (liver, tumour, spleen)
    ]
    assert categories == ["91723000", "49755003", "91723000"]
    colours = [tuple(segment.RecommendedDisplayCIELabValue) for segment in (liver, tumour, spleen)]
    assert (
        highdicom.color.CIELabColor.from_dicom_value(colours[0]).to_rgb() == (0xDD, 0x82, 0x65)
        and len(set(colours)) == 3
    )
    assert (
        task.name in liver.SegmentationAlgorithmIdentificationSequence[0].AlgorithmName
        and task.name in seg.SeriesDescription
    )
    (referenced,) = seg.ReferencedSeriesSequence
    assert (
        referenced.SeriesInstanceUID == "1.2.3" and len(referenced.ReferencedInstanceSequence) == 4
    )


@pytest.mark.parametrize("dims", [2, 3])
def test_a_series_in_one_file_gets_the_masks_of_its_slices(dims: int, tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    enhanced_series(tmp_path / "in/mr.dcm")
    dicom_series(tmp_path / "in/ct")
    task = (
        cube_task(image_mode="patch", channels=1, orientation="LPS")
        if dims == 3
        else load_task({**SLICES, "size": [8, 8]})
    )
    for seg in (False, True):
        summary = bright(task, [tmp_path / "in"], tmp_path / f"out{seg}", seg=seg)
        assert summary.failed == [] and summary.images == 2
    masks = [
        nibabel.load(tmp_path / "outFalse/mr_seg.nii.gz"),
        nibabel.load(tmp_path / "outFalse/ct_seg.nii.gz"),
    ]
    np.testing.assert_array_equal(masks[0].affine, masks[1].affine)
    voxels, expected = (np.asarray(mask.dataobj) > 0 for mask in masks)
    np.testing.assert_array_equal(voxels, expected)
    (tmp_path / "datalist.json").write_text(
        json.dumps({"test": [{"image": "in/mr.dcm", "label": "outTrue/mr_seg.dcm"}]})
    )
    source = Source(tmp_path, task)
    (entry,) = source.listed_items()
    labelled = source.mask(entry, source.image(entry))[0] > 0
    assert 0 < labelled.sum() < labelled.size
    np.testing.assert_array_equal(labelled if dims == 3 else np.swapaxes(labelled, 0, 1), voxels)


def test_an_image_that_can_have_no_segmentation_object_is_named(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    (tmp_path / "in/single").mkdir(parents=True)
    for name in ("anonymised", "ct"):
        dicom_series(tmp_path / "in" / name)
    change(tmp_path / "in/anonymised", without=("FrameOfReferenceUID",))
    shutil.copy(tmp_path / "in/ct/0.dcm", tmp_path / "in/single/one.dcm")
    task = load_task({**SLICES, "size": [8, 8]})
    summary = bright(task, [tmp_path / "in"], tmp_path / "out", seg=True)
    assert (
        summary.images == 1 and (tmp_path / "out/ct_seg.dcm").is_file() and summary.table.is_file()
    )
    anonymised, single = summary.failed
    assert "FrameOfReferenceUID" in anonymised and "single/one.dcm" in single


def test_segmentation_objects_need_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="highdicom"):
        bright(cube_task(), [tmp_path], tmp_path / "out", seg=True)


def test_a_series_in_time_gets_a_mask_on_its_slices(tmp_path: Path) -> None:
    folder = change(dicom_series(tmp_path / "cine"), ImagePositionPatient=[10, 20, 30])
    task = load_task({**SLICES, "size": [6, 5]})
    summary = bright(task, [folder], tmp_path / "out")
    assert summary.images == 1 and not summary.failed
    mask = np.asarray(nibabel.load(tmp_path / "out/cine_seg.nii.gz").dataobj)
    assert mask.shape == (5, 6, 4) and mask.any() and not mask.all()
    pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    with pytest.raises(DataError, match="no volume of 4 slices"):
        dicom_seg(folder, {"lesion": np.ones((5, 6, 4), bool)}, cube_task())


def test_labels_that_begin_alike_have_different_codes(tmp_path: Path) -> None:
    """A code has 16 characters at most (PS3.5, SH)."""
    highdicom = pytest.importorskip("highdicom", reason="the extra dicomseg is not installed")
    dicom_series(tmp_path / "ct")
    labels = ["lung_lower_lobe_left", "lung_lower_lobe_right", "heart"]
    task = cube_task(image_mode="patch", channels=1, target="multilabel", labels=labels)
    drawn = {label: np.ones((5, 6, 4), bool) for label in labels}
    content = dicom_seg(tmp_path / "ct", drawn, task)
    (tmp_path / "seg.dcm").write_bytes(content)
    segments = highdicom.seg.segread(tmp_path / "seg.dcm").SegmentSequence
    codes = [segment.SegmentedPropertyTypeCodeSequence[0] for segment in segments]
    assert [code.CodeMeaning for code in codes] == labels and codes[2].CodeValue == "heart"
    values = {code.CodeValue for code in codes}
    assert len(values) == 3 and max(map(len, values)) <= 16
