"""Generated federations in which one mechanism of a paper has to pay, 32 x 32 pixels, one channel.

Synthetic, no patient data. `medflare study --suite mechanisms/NAME` compares methods in them. A
federation's name, a site's name and a draw decide a site's images. Labels of validation and test
images are always right.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations

import numpy as np

from medflare.core.errors import DataError
from medflare.core.rng import numpy_generator
from medflare.core.settings import no_such
from medflare.data.phantom import Photograph

SIDE = 32
_ROWS, _COLUMNS = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
# Pixels by which a site draws outside of the edge.
_MARGINS = {"A": -1.8, "B": -0.6, "C": 0.6, "D": 1.8}
# Of the classes at a site.
_CLASS_FREQUENCIES = {"A": (0.5, 0.25, 0.25), "B": (0.25, 0.5, 0.25), "C": (0.25, 0.25, 0.5)}
_NO_IMAGE = np.zeros((0, 0), np.uint8)  # the mask of an image for classification
Rng = np.random.Generator


def conventions(site: str, rng: Rng) -> Iterable[Photograph]:
    """A blurred disk, the target, and a small square in noise, few images to train with.

    All sites can learn together which of the two is the disk; by how much to draw outside of its
    edge each site must learn alone. Light and stripes tell the site, the edge does not tell its
    margin.
    """
    index = sorted(_MARGINS).index(site)
    angle = np.pi * index / len(_MARGINS)
    style = 0.3 * index + 0.15 * np.sin(_ROWS * np.cos(angle) + _COLUMNS * np.sin(angle))
    for split, name in _names(training=6, validation=16, test=40):
        distance, square, radius = _disk_and_square(rng)
        objects = _blurred(distance - radius) + _blurred(square - 2.5)
        image = objects + style + rng.normal(0, 0.3, (SIDE, SIDE))
        yield _photograph(name, split, image, mask=distance < radius + _MARGINS[site])


def two_disks(site: str, rng: Rng) -> Iterable[Photograph]:
    """A bright and a dark disk on grey. The target is the bright one at A and C, the dark one at B.

    Outside: W is like A and C in other light; X is like B; the images of Y are half like A, half
    like B; at Z the target is a third, striped disk, which no site has learnt.
    """
    for number, (split, name) in enumerate(_names(training=24, validation=8, test=40)):
        like = {"X": "B", "Y": "AB"[number % 2]}.get(site, site)
        disks = _disks(rng, 3 if like == "Z" else 2)
        bright, dark = disks[:2]
        image = 0.5 + 0.4 * bright - 0.4 * dark + rng.normal(0, 0.08, (SIDE, SIDE))
        if like == "C":
            image += 0.3 * (_COLUMNS / (SIDE - 1) - 0.5)
        if like == "W":
            image += 0.3 * (_ROWS / (SIDE - 1) - 0.5)
        if like == "B":
            image += 0.15 * np.sin(_ROWS)
        if like == "Z":
            image += 0.4 * disks[2] * np.sin(2 * _COLUMNS)
        target = {"B": 1, "Z": 2}.get(like, 0)
        yield _photograph(name, split, image, mask=disks[target])


def wrong_labels(site: str, rng: Rng) -> Iterable[Photograph]:
    """`clean_labels` with 20 % wrong labels of training images."""
    images = list(clean_labels(site, rng))
    training = [index for index, image in enumerate(images) if image.split == "training"]
    for index in rng.choice(training, len(training) // 5, replace=False):
        wrong = (images[index].grade + int(rng.integers(1, 3))) % 3
        images[index] = images[index]._replace(grade=wrong)
    return images


def clean_labels(site: str, rng: Rng) -> Iterable[Photograph]:
    """Gratings of three directions in noise; each site has its light, and one class more often than
    the others.
    """
    light = {"A": 0.2, "B": 0.5, "C": 0.8}[site]
    for split, name in _names(training=20, validation=18, test=60):
        label = int(rng.choice(3, p=_CLASS_FREQUENCIES[site]))
        yield _photograph(name, split, light + _grating(rng, label, noise=0.6), label)


def contrary_labels(site: str, rng: Rng) -> Iterable[Photograph]:
    """`clean_labels` in which each site gives the three directions other names: a model of all
    sites' images is of no use.
    """
    shift = "ABC".index(site)
    for image in clean_labels(site, rng):
        yield image._replace(grade=(image.grade + shift) % 3)


def noisy_sites(site: str, rng: Rng) -> Iterable[Photograph]:
    """Gratings of three directions; training labels of D and E are random."""
    for split, name in _names(training=48, validation=18, test=60):
        label = int(rng.integers(3))
        image = _photograph(name, split, 0.5 + _grating(rng, label, noise=1.0), label)
        if site in "DE" and split == "training":
            image = image._replace(grade=int(rng.integers(3)))
        yield image


def shifted_light(site: str, rng: Rng) -> Iterable[Photograph]:
    """Gratings of three directions, for a network without normalisation.

    Each image of X has another light, within a standard deviation of the training images (0.78):
    FedDAG's generator can make it with α = 1. The light of Y is beyond.
    """
    shifts = {"X": (0.0, 0.75), "Y": (1.2, 1.8)}
    for split, name in _names(training=48, validation=18, test=60):
        label = int(rng.integers(3))
        light = 0.5
        if site in shifts:
            light += rng.uniform(*shifts[site]) * rng.choice([-1, 1])
        yield _photograph(name, split, light + _grating(rng, label, noise=0.7), label)


# Each with the names of its sites.
FEDERATIONS = {
    "mechanisms/conventions": (conventions, "ABCD"),
    "mechanisms/two_disks": (two_disks, "ABCWXYZ"),
    "mechanisms/wrong_labels": (wrong_labels, "ABC"),
    "mechanisms/clean_labels": (clean_labels, "ABC"),
    "mechanisms/contrary_labels": (contrary_labels, "ABC"),
    "mechanisms/noisy_sites": (noisy_sites, "ABCDEX"),
    "mechanisms/shifted_light": (shifted_light, "ABCXY"),
}


def photographs(federation: str, site: str, draw: int = 0) -> list[Photograph]:
    """All images of a site; another `draw` gives other images of the same kind.

    Raises:
        DataError: there is no such site.
    """
    generate, sites = FEDERATIONS[federation]
    if site not in [*sites]:
        raise DataError(no_such("site", site, sites, "generated federation"))
    return list(generate(site, numpy_generator(draw, "mechanisms", federation, site)))


def _names(**counts: int) -> Iterator[tuple[str, str]]:
    """Split and name of each image."""
    for split, count in counts.items():
        for number in range(count):
            yield split, f"{split}-{number:03d}"


def _photograph(
    name: str, split: str, image: np.ndarray, label: int = 0, mask: np.ndarray = _NO_IMAGE
) -> Photograph:
    """One image, which is a patient of its own."""
    pixels = image.astype(np.float32)[..., None]
    return Photograph(pixels, mask.astype(np.uint8), label, name, name, split)


def _disks(rng: Rng, count: int) -> list[np.ndarray]:
    """Disks that do not touch, as masks."""
    while True:
        centres = rng.uniform(5, 27, (count, 2))
        radii = rng.uniform(3, 5, count)
        apart = True
        for first, second in combinations(range(count), 2):
            distance = np.hypot(*(centres[first] - centres[second]))
            if distance <= radii[first] + radii[second] + 1:
                apart = False
        if apart:
            break
    disks = []
    for (row, column), radius in zip(centres, radii, strict=True):
        disks.append(np.hypot(_ROWS - row, _COLUMNS - column) < radius)
    return disks


def _disk_and_square(rng: Rng) -> tuple[np.ndarray, np.ndarray, float]:
    """Distances to the centre of a disk and, by the longer side, of a turned square; radius of the
    disk.
    """
    centre = rng.uniform(10, 22, 2)
    radius = rng.uniform(4, 7)
    while True:
        other = rng.uniform(6, 26, 2)
        angle = rng.uniform(0, np.pi)
        if np.hypot(*(other - centre)) > radius + 6:
            break
    rows = _ROWS - other[0]
    columns = _COLUMNS - other[1]
    along = np.abs(rows * np.cos(angle) + columns * np.sin(angle))
    across = np.abs(columns * np.cos(angle) - rows * np.sin(angle))
    return np.hypot(_ROWS - centre[0], _COLUMNS - centre[1]), np.maximum(along, across), radius


def _blurred(outside: np.ndarray) -> np.ndarray:
    """1 inside of an edge, 0 outside, from the distance to it."""
    return 1 / (1 + np.exp(outside / 1.5))


def _grating(rng: Rng, label: int, noise: float) -> np.ndarray:
    """Stripes in the direction of a class, 60 degrees apart, of any phase and of 5 to 9 pixels, in
    noise.
    """
    angle = np.pi * label / 3 + rng.normal(0, 0.1)
    along = _ROWS * np.cos(angle) + _COLUMNS * np.sin(angle)
    wave = np.sin(2 * np.pi * along / rng.uniform(5, 9) + rng.uniform(0, 2 * np.pi))
    return 0.5 * wave + rng.normal(0, noise, (SIDE, SIDE))
