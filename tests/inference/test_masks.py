from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_tasks import small_task
from helpers.volume_sites import dicom_slice
from medflare.data.geometry import Grid
from medflare.data.reading import label_values, read_image, read_stored
from medflare.data.targets import encode_mask
from medflare.data.transforms import resized
from medflare.inference import masks
from medflare.inference.inputs import Input
from medflare.inference.masks import label_map, sizes, write_masks
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.metrics import foreground

PHANTOM = load_task("phantom")  # disc: values 1 and 2, cup: value 2


def task_of(target: str, labels: list[str], **settings: dict[str, Any]) -> TaskConfig:
    return load_task(
        {**PHANTOM.to_dict(), "target": target, "labels": labels, "label_values": {}, **settings}
    )


TASKS = [
    task_of("binary", ["vessel"]),
    task_of("binary", ["tumour"], label_values={"tumour": [4, 1]}),
    task_of("multiclass", ["background", "a", "b"]),
    task_of(
        "multiclass",
        ["background", "a", "b"],
        label_values={"background": [9], "a": [300, 2], "b": [5]},
    ),
    task_of("multilabel", ["x", "y"]),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.target}-{len(task.label_values)}")
def test_masks_read_back_are_what_the_metrics_count(task: TaskConfig, tmp_path: Path) -> None:
    logits = torch.randn(task.outputs, 7, 5, generator=torch.Generator().manual_seed(0))
    p = task.probabilities(logits[None])
    masks = label_map(p[0], task)
    files = write_masks(Input(Path("a/scan.png"), "sub/scan"), masks, task, tmp_path)
    assert files[0].parent == tmp_path / "sub"
    stored = np.concatenate(
        [label_values(read_stored(file).array, file) for file in files]
    ).swapaxes(1, 2)
    target = torch.as_tensor(encode_mask(stored, task, "mask"))
    kept = foreground(p, task)[0].long()
    if task.target == "multiclass":
        target = torch.stack([target[0] == 1, target[0] == 2]).long()
    assert torch.equal(target, kept) and 0 < kept.sum() < kept.numel()
    assert list(sizes(masks, task).values()) == kept.flatten(1).sum(dim=1).tolist()


def test_one_mask_for_several_structures() -> None:
    # disc, cup.
    p = torch.tensor([[0.9, 0.9, 0.1, 0.2, 0.45, 0.5], [0.8, 0.3, 0.1, 0.9, 0.95, 0.5]]).reshape(
        2, 1, 6
    )
    # cup without disc has no value: where the disc is unlikely it is background, where it is nearly there it is cup in disc
    assert label_map(p, PHANTOM).tolist() == [[[2, 1, 0, 2, 2, 0]]]
    products = [(0.8 * 0.1, 0), (0.2 * 0.1, 1), (0.2 * 0.9, 2)]
    assert max(products)[1] == 2, "the fourth pixel by hand"
    assert sizes(label_map(p, PHANTOM), PHANTOM) == {"pixels_disc": 4, "pixels_cup": 3}


def test_size_is_resized() -> None:
    p = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert resized(p, (8, 8)) is p
    larger = resized(p, (16, 24))
    smaller = resized(p, (4, 2))
    mixed = resized(p, (16, 4))
    assert larger.shape == (1, 2, 16, 24) and mixed.shape == (1, 2, 16, 4)
    torch.testing.assert_close(smaller, p.reshape(1, 2, 4, 2, 2, 4).mean(dim=(3, 5)))
    ramp = torch.linspace(0.5, 7.5, 8).expand(1, 1, 8, 8)  # pixel centres at 0.5, 1.5, ...
    torch.testing.assert_close(resized(ramp, (16, 16))[0, 0, 3, 1:-1], torch.arange(0.75, 7.5, 0.5))


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LIP", "ASR", "SPL"])
def test_nifti_masks_lie_on_their_image(codes: str, tmp_path: Path) -> None:
    ornt = nibabel.orientations.axcodes2ornt(tuple(codes))
    affine = np.diag([0.8, 1.5, 4, 1]) @ nibabel.orientations.inv_ornt_aff(ornt, (5, 6, 7))
    volume = np.random.default_rng(0).random((5, 6, 7)).astype(np.float32)
    image = nibabel.Nifti1Image(volume, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / "scan.nii.gz")
    read = read_image([tmp_path / "scan.nii.gz"], small_task()).array
    (file,) = write_masks(
        Input(tmp_path / "scan.nii.gz", "scan"),
        (read > 0.7).astype(np.int64),
        TASKS[0],
        tmp_path / "out",
    )
    written = nibabel.load(file)
    np.testing.assert_array_equal(np.asarray(written.dataobj), volume > 0.7)
    np.testing.assert_array_equal(written.affine, nibabel.load(tmp_path / "scan.nii.gz").affine)
    assert (
        written.header.get_data_dtype() == np.uint8 and written.header.get_xyzt_units()[0] == "mm"
    )
    np.testing.assert_array_equal(read_image([file], small_task()).array, read > 0.7)


def test_dicom_volumes_become_nifti_in_the_patients_space(tmp_path: Path) -> None:
    # rows, columns, slices.
    volume = np.random.default_rng(0).integers(0, 200, (4, 6, 3)).astype(np.uint8)
    for number in range(3):
        dicom_slice(
            tmp_path / f"ct/{number}.dcm", np.ascontiguousarray(volume[..., number]), number
        )
    mask = np.zeros((1, 4, 6, 3), np.int64)
    mask[0, 1, 2, 2] = 1  # row 1, column 2, slice 2
    (file,) = write_masks(Input(tmp_path / "ct", "ct"), mask, TASKS[0], tmp_path / "out")
    written = nibabel.load(file)
    place = written.affine @ [*np.argwhere(np.asarray(written.dataobj))[0], 1]
    # DICOM: x = 10 + 0.5 column, y = 20 + 2 row, z = 30 + 4 slice, in LPS; NIfTI turns the signs of x and y
    np.testing.assert_allclose(place[:3], [-(10 + 0.5 * 2), -(20 + 2 * 1), 30 + 4 * 2])


def test_masks_have_different_names(tmp_path: Path) -> None:
    labels = ["肝臓", "脾臓", "left lung", "Left-lung", "heart_1"]
    task = task_of("multilabel", labels)
    masks = np.stack([np.full((4, 4), number) for number in range(5)])
    files = write_masks(Input(tmp_path / "b.png", "b"), masks, task, tmp_path)
    assert [file.name[len("b_seg") : -len(".png")] for file in files] == [
        "_肝臓",
        "_脾臓",
        "_left-lung_3",
        "_Left-lung_4",
        "_heart-1",
    ]
    assert [int(np.asarray(Image.open(file)).max()) for file in files] == [0, 1, 2, 3, 4]


def test_a_mask_of_an_image_without_position_has_no_affine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        masks, "series_grid", lambda path: Grid((4, 3, 2), np.eye(4), has_affine=False)
    )
    (file,) = write_masks(
        Input(tmp_path / "frames.dcm", "frames"),
        np.ones((1, 3, 4, 2), np.int64),
        TASKS[0],
        tmp_path,
    )
    header = nibabel.load(file).header
    assert nibabel.load(file).shape == (4, 3, 2) and (
        header["sform_code"],
        header["qform_code"],
    ) == (0, 0)
