"""The embedded default federation: generated colour photographs of the optic disc and its cup.

Synthetic, no patient data. A site's name decides its camera (colour cast, gamma, vignetting, blur,
noise, field of view, framing of the disc) and its annotator's bias in drawing boundaries. So sites
differ as hospitals do, and a name always gives the same images. The two images of a patient, one of
each eye, share the optic disc's anatomy and the pigmentation.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from medflare.core.rng import numpy_generator

GRADES = ("small_cup", "medium_cup", "large_cup")
SIDE = 64  # pixels of an image
_HOSPITALS = ("north", "south", "west")  # of a table, with the images of site-1 to site-3
_OVERSAMPLING = 2  # scenes are drawn larger and reduced, which smooths edges
_CANVAS = SIDE * _OVERSAMPLING
_ROWS, _COLUMNS = np.mgrid[0:_CANVAS, 0:_CANVAS].astype(np.float32) / _OVERSAMPLING

# Diffuse colours (R, G, B in linear light) of what a fundus camera sees.
_RETINA = np.array([0.62, 0.25, 0.11], np.float32)
_MACULA = np.array([0.40, 0.14, 0.06], np.float32)
_DISC = np.array([0.92, 0.60, 0.28], np.float32)
_CUP = np.array([1.00, 0.87, 0.62], np.float32)
_VESSEL = np.array([0.38, 0.07, 0.04], np.float32)


class Camera(NamedTuple):
    """Device, annotator and patients of a site; lengths in pixels of the 64 x 64 image."""

    gains: tuple[float, float, float]  # colour cast: factors on red, green, blue
    gamma: float
    vignetting: float  # loss of light in the corners, 0 to 1
    blur: float  # standard deviation
    noise: float  # standard deviation, of full scale
    field: float  # radius of the illuminated circle
    disc_radius: float  # mean radius of the optic disc: the magnification
    offset: tuple[float, float]  # mean position of the disc from the centre (down, nasal)
    disc_habit: float  # annotator: ratio of drawn to true radius of the disc
    cup_habit: float
    cup_ratio: float  # mean cup-to-disc ratio of its patients
    patients: int


class Photograph(NamedTuple):
    """One generated image."""

    image: np.ndarray  # uint8 (64, 64, 3)
    mask: np.ndarray  # uint8 (64, 64): 0 background, 1 disc rim, 2 cup
    grade: int  # vertical cup-to-disc ratio: 0 below 0.45, 1 up to 0.65, 2 above
    patient: str
    name: str
    split: str


class _Eye(NamedTuple):
    """Geometry of one eye in pixels of the 64 x 64 image; mask and picture are drawn from it."""

    centre: tuple[float, float]
    radius: float
    stretch: float  # vertical over horizontal radius of the disc
    cup_ratio: float
    cup_shift: tuple[float, float]
    temporal: int  # +1: the macula lies to the right of the disc, -1: to the left


def camera(site: str) -> Camera:
    """The camera and the annotator of a site: a function of the site's name alone."""
    rng = numpy_generator(0, "phantom", site, "camera")
    warm = rng.uniform(-1, 1)
    tint = rng.uniform(-1, 1)
    return Camera(
        gains=(1.0 + 0.22 * warm, 1.0 + 0.25 * tint, 1.0 - 0.45 * warm),
        gamma=float(np.exp(rng.uniform(-0.45, 0.45))),
        vignetting=rng.uniform(0.1, 0.65),
        blur=rng.uniform(0.2, 1.3),
        noise=rng.uniform(0.005, 0.045),
        field=rng.uniform(29, 42),
        disc_radius=rng.uniform(10, 15.5),
        offset=(rng.uniform(-3, 3), rng.uniform(-6, 6)),
        disc_habit=rng.uniform(0.90, 1.12),
        cup_habit=rng.uniform(0.82, 1.20),
        cup_ratio=rng.uniform(0.44, 0.64),
        patients=int(rng.integers(38, 51)),
    )


def photographs(site: str) -> list[Photograph]:
    """All images of a site, about 88 from 44 patients; splits by patient, 55 / 18 / 27 %."""
    device = camera(site)
    order = numpy_generator(0, "phantom", site, "splits").permutation(device.patients)
    validation = round(0.18 * device.patients)
    test = round(0.27 * device.patients)
    splits = np.full(device.patients, "training", dtype="U10")
    splits[order[:validation]] = "validation"
    splits[order[validation : validation + test]] = "test"
    images = []
    for number in range(device.patients):
        patient = f"synthetic-{number:03d}"
        rng = numpy_generator(0, "phantom", site, patient)
        anatomy = {  # what both eyes share
            "radius": device.disc_radius * rng.uniform(0.88, 1.12),
            "stretch": rng.uniform(1.0, 1.16),
            "cup_ratio": float(np.clip(rng.normal(device.cup_ratio, 0.13), 0.25, 0.82)),
            "pigment": rng.uniform(0.8, 1.15),
        }
        for side, temporal in (("left", 1), ("right", -1)):
            drawn = _photograph(rng, device, anatomy, temporal)
            images.append(Photograph(*drawn, patient, f"{patient}-{side}", str(splits[number])))
    return images


def write_photographs(folder: Path, kind: str, layout: str = "png") -> int:
    """Write images of one site, or with the layout "csv" of three hospitals; returns their number.

    Args:
        folder: receives images/ and masks/ ("segmentation"; mask values 1 disc rim, 2 cup) or a
            folder per grade ("classification").
        layout: "png" files; "dicom": the images as DICOM files with PatientID; "csv": PNG files in
            images/ (and masks/), and images.csv with the columns image, grade or mask, patient and
            hospital.
    """
    csv = layout == "csv"
    segmentation = kind == "segmentation"
    hospitals = _HOSPITALS if csv else _HOSPITALS[:1]
    suffix = "dcm" if layout == "dicom" else "png"
    rows = [("image", "mask" if segmentation else "grade", "patient", "hospital")]
    for number, hospital in enumerate(hospitals, 1):
        prefix = f"{hospital}-" if csv else ""
        for picture in photographs(f"site-{number}"):
            name = prefix + picture.name
            patient = prefix + picture.patient
            label = GRADES[picture.grade]
            image = f"images/{name}.{suffix}"
            if not segmentation and not csv:
                image = f"{label}/{name}.{suffix}"
            _write_image(folder / image, picture.image, patient)
            if segmentation:
                label = f"masks/{name}.png"
                _write_image(folder / label, picture.mask, patient)
            rows.append((image, label, patient, hospital))
    if csv:
        text = "".join(",".join(row) + "\n" for row in rows)
        (folder / "images.csv").write_text(text, encoding="utf-8")
    return len(rows) - 1


def _write_image(path: Path, pixels: np.ndarray, patient: str) -> None:
    """Write uint8 pixels (H, W) or (H, W, 3) as PNG, or (H, W, 3) as DICOM of a photograph, by the
    suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        from PIL import Image  # a job that brings its code needs torch, MONAI and FLARE only

        Image.fromarray(pixels).save(path)
        return
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.pixels import set_pixel_data
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.SOPClassUID = SecondaryCaptureImageStorage
    file.SOPInstanceUID = generate_uid(entropy_srcs=["image", path.stem])
    file.SeriesInstanceUID = generate_uid(entropy_srcs=["series", path.stem])
    file.StudyInstanceUID = generate_uid(entropy_srcs=["study", path.stem])
    file.PatientID = patient
    file.PatientName = "synthetic"
    file.Modality = "XC"
    file.SeriesNumber = 1
    file.InstanceNumber = 1
    set_pixel_data(file, pixels, "RGB", 8)
    file.save_as(path, enforce_file_format=True)


def _photograph(
    rng: np.random.Generator, device: Camera, anatomy: dict[str, float], temporal: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Image, mask and grade of one eye."""
    eye = _Eye(
        centre=(
            SIDE / 2 + device.offset[0] + rng.normal(0, 1.5),
            SIDE / 2 - temporal * device.offset[1] + rng.normal(0, 1.5),
        ),
        radius=anatomy["radius"] * rng.uniform(0.96, 1.04),
        stretch=anatomy["stretch"],
        cup_ratio=float(np.clip(anatomy["cup_ratio"] + rng.normal(0, 0.04), 0.2, 0.85)),
        cup_shift=(rng.normal(0, 0.05), temporal * rng.uniform(0.0, 0.12)),
        temporal=temporal,
    )
    scene = _scene(rng, eye, anatomy["pigment"])
    image = _expose(rng, device, scene)
    mask = _annotate(rng, device, eye)
    return image, mask, int(np.searchsorted([0.45, 0.65], eye.cup_ratio))


def _distance(eye: _Eye, ratio: float = 1.0, shift: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """Elliptic radius of every canvas pixel around the disc (ratio 1) or the cup inside it: 1 on
    the boundary.
    """
    rows = (_ROWS - eye.centre[0] - shift[0] * eye.radius) / (eye.radius * eye.stretch * ratio)
    columns = (_COLUMNS - eye.centre[1] - shift[1] * eye.radius) / (eye.radius * ratio)
    return np.sqrt(rows**2 + columns**2)


def _edge(distance: np.ndarray, softness: float) -> np.ndarray:
    """1 inside, 0 outside, with a smooth step of relative width `softness` at distance 1; (H, W,
    1).
    """
    step = 1 / (1 + np.exp(np.clip((distance - 1) / softness, -30, 30)))
    return step[..., None].astype(np.float32)


def _scene(rng: np.random.Generator, eye: _Eye, pigment: float) -> np.ndarray:
    """Linear light of the retina, float32 (canvas, canvas, 3)."""
    texture = _smooth_noise(rng, cells=9) * 0.10 + _smooth_noise(rng, cells=28) * 0.05
    scene = _RETINA * pigment * (1 + texture[..., None])
    down = _ROWS - (eye.centre[0] + 2)
    right = _COLUMNS - (eye.centre[1] + eye.temporal * 2.6 * eye.radius)
    macula = np.exp(-(down**2 + right**2) / (2 * (0.9 * eye.radius) ** 2))[..., None]
    scene = scene + macula * (_MACULA - _RETINA) * 0.8
    halo = np.exp(-((_distance(eye) - 1).clip(0) ** 2) / 0.08)[..., None]
    scene = scene + halo * 0.10 * (_DISC - _RETINA)
    scene = _over(scene, _DISC * rng.uniform(0.92, 1.05), _edge(_distance(eye), 0.05))
    cup = _edge(_distance(eye, eye.cup_ratio, eye.cup_shift), 0.12)
    scene = _over(scene, _CUP * rng.uniform(0.94, 1.04), 0.9 * cup)
    return _over(scene, _VESSEL, _vessels(rng, eye)[..., None] * 0.8)


def _over(below: np.ndarray, colour: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    return below + opacity * (colour - below)


def _smooth_noise(rng: np.random.Generator, cells: int) -> np.ndarray:
    """Choroidal texture: random values on a coarse grid, interpolated; (canvas, canvas), roughly
    standard normal.
    """
    coarse = torch.from_numpy(rng.normal(0, 1, (1, 1, cells, cells)).astype(np.float32))
    return F.interpolate(coarse, (_CANVAS, _CANVAS), mode="bicubic")[0, 0].numpy()


def _vessels(rng: np.random.Generator, eye: _Eye) -> np.ndarray:
    """Opacity (canvas, canvas) of arteries and veins that leave the disc up and down and arch
    around the macula.
    """
    step = eye.radius / 4
    pieces: list[tuple[float, ...]] = []
    for vertical in (-1, 1):
        for side, reach in ((eye.temporal, 1.0), (-eye.temporal, 0.75)):
            for width, bend in ((2.6, rng.uniform(0.7, 1.1)), (1.7, rng.uniform(0.3, 0.6))):
                heading = vertical * math.pi / 2 + rng.normal(0, 0.12)
                turn = side * vertical * -bend * reach
                pieces += _vessel(rng, eye.centre, heading, turn, width, step)
    return _blurred(_painted(np.array(pieces), step), 0.5 * _OVERSAMPLING)


def _vessel(
    rng: np.random.Generator,
    start: tuple[float, float],
    heading: float,
    bend: float,
    width: float,
    step: float,
) -> Iterator[tuple[float, float, float, float, float]]:
    """One vessel as straight pieces of length `step`: row and column of the start, steps down and
    right, width.

    It turns by `bend` radians in all, becomes thinner and may branch once.
    """
    row, column = start
    branch_at = int(rng.integers(4, 9)) if width > 1 else -1
    for number in range(16):
        heading += bend / 12 * (number < 12) + rng.normal(0, 0.07)
        down = math.sin(heading)
        right = math.cos(heading)
        yield row, column, down, right, width
        row += step * down
        column += step * right
        width *= 0.96
        if number == branch_at:
            turned = heading + rng.choice([-1, 1]) * rng.uniform(0.4, 0.8)
            yield from _vessel(rng, (row, column), turned, bend / 2, width * 0.6, step)


def _painted(pieces: np.ndarray, step: float) -> np.ndarray:
    """Opacity (canvas, canvas) of pieces (m, 5), see `_vessel`, painted with round dabs half a
    pixel apart; wide vessels are darker.
    """
    row, column, down, right, width = pieces.T[..., None]
    along = np.arange(0, step, 0.5)
    dabs = np.broadcast_arrays(row + along * down, column + along * right, width)
    rows, columns, widths = np.stack(dabs).reshape(3, -1)
    canvas = np.zeros((_CANVAS, _CANVAS), np.float32)
    centres = _OVERSAMPLING * np.stack([rows, columns], axis=-1)
    radii = np.maximum(1, _OVERSAMPLING * widths / 2) / 2
    opacity = 0.6 + 0.15 * widths.clip(max=2.6)
    offsets = np.array(list(np.ndindex(4, 4)))  # as far as the widest brush reaches
    pixels = np.floor(centres).astype(int) + offsets[:, None] - 1
    cover = (radii + 0.5 - np.hypot(*np.moveaxis(pixels - centres, -1, 0))).clip(0, 1)
    seen = ((pixels >= 0) & (pixels < _CANVAS)).all(axis=-1)
    np.maximum.at(canvas, tuple(pixels[seen].T), (opacity * cover)[seen])
    return canvas


def _blurred(picture: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of standard deviation `sigma` pixels, (H, W) or (H, W, C) float32; borders are
    replicated.
    """
    # MONAI's GaussianFilter bit by bit, without its import, which takes seconds.
    tail = int(max(4 * sigma, 0.5) + 0.5)
    edges = torch.arange(-tail, tail + 2) - 0.5  # of the pixels
    kernel = (0.70710678 / torch.tensor(sigma) * edges).erf().diff() / 2
    planes = torch.from_numpy(np.atleast_3d(picture).astype(np.float32)).permute(2, 0, 1)[None]
    reach = math.ceil(4 * sigma)
    smooth = F.pad(planes, (reach + tail,) * 4, mode="replicate")
    for weight in (kernel[:, None], kernel[None]):
        weights = weight.expand(planes.shape[1], 1, -1, -1)
        smooth = F.conv2d(smooth, weights, groups=len(weights))
    smooth = smooth[0, :, reach:-reach, reach:-reach]
    return smooth.permute(1, 2, 0).numpy().reshape(picture.shape)


def _expose(rng: np.random.Generator, device: Camera, scene: np.ndarray) -> np.ndarray:
    """What the camera stores: uint8 (64, 64, 3)."""
    radius = np.hypot(_ROWS - SIDE / 2, _COLUMNS - SIDE / 2)
    vignette = 1 - device.vignetting * (radius / (SIDE / 2)) ** 2 / 2
    light = vignette / (1 + np.exp(np.clip((radius - device.field) * 2.5, -30, 30)))
    gains = np.array(device.gains, np.float32)
    exposed = scene * gains * light[..., None] * rng.uniform(0.88, 1.12)
    focused = _blurred(255 * exposed.clip(0, 1) ** device.gamma, device.blur * _OVERSAMPLING)
    stored = focused.reshape(SIDE, _OVERSAMPLING, SIDE, _OVERSAMPLING, 3).mean(axis=(1, 3))
    noisy = stored + 255 * device.noise * rng.normal(0, 1, (SIDE, SIDE, 3))
    return noisy.clip(0, 255).astype(np.uint8)


def _annotate(rng: np.random.Generator, device: Camera, eye: _Eye) -> np.ndarray:
    """Masks with the annotator's bias and noise of both boundaries."""
    disc = _distance(eye, device.disc_habit * rng.normal(1, 0.015)) < 1
    ratio = min(eye.cup_ratio * device.cup_habit * rng.normal(1, 0.03), 0.95 * device.disc_habit)
    cup = _distance(eye, ratio, eye.cup_shift) < 1
    drawn = np.where(disc & cup, 2, disc).astype(np.uint8)
    return drawn[::_OVERSAMPLING, ::_OVERSAMPLING].copy()
