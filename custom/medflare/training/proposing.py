"""A task proposed from what lies in a data root, each choice with its reason: for masks by the rules of `medflare task plan`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import ConfigError
from medflare.data.checking.fingerprint import DatasetFingerprint, fingerprints
from medflare.data.checking.planning import UNDECIDED, Choice, Modality, Plan, intensity, plan, pooled
from medflare.data.dataset_import.inspection import Said, Seen, look
from medflare.data.targets import scarce, scarce_line
from medflare.networks.weights import INSTALL, PACKAGED, packaged_weights, scaled_for
from medflare.tasks.config import load_task
from medflare.training.check import check_task

_LARGEST: Final = {2: 224, 3: 96}  # sides of what a classifier is fed with
_STEP: Final = 16  # that sides are multiples of
_FEW: Final = 2000  # training images below which a small network is enough
_SKEWED: Final = 3  # from which the largest class outweighs the smallest
_AIR: Final = -200  # Hounsfield units that nothing but CT stores
_BATCH: Final = 16
_PRETRAINED: Final = "efficientnet_lite0"


@dataclass(frozen=True)
class Answers(Said):
    """What the user says about the task; what is empty is proposed.

    Attributes:
        size: of what the network is fed with; images are shrunk to it.
        network: its name.
        modality: "mr", "ct" or "photo", see `planning.plan`; "" for what the intensities say.
        memory: GiB of the smallest device that trains.
        pretrained: whether there must be weights to start from; else they are proposed where a package that is installed brings them.
    """

    size: tuple[int, ...] = ()
    network: str = ""
    modality: Modality | None = None
    memory: float = 8.0
    pretrained: bool = False


def propose(root: Path, answers: Answers) -> Plan:
    """A task for the images below a data root, which `medflare data check` accepts.

    Raises:
        ConfigError: an answer that does not fit, or images that no network of the rules takes.
        DataError: no datalist, or files that cannot be read or understood.
    """
    seen = look(root, answers)
    dims = seen.settings["spatial_dims"]
    if answers.size and len(answers.size) != dims:
        raise ConfigError(f"--size {','.join(map(str, answers.size))}: images have {dims} dimensions; give as many sides")
    metric = "dice" if seen.settings["kind"] == "segmentation" else "f1_macro"
    learnt = seen.settings | {"metric": metric}
    found = fingerprints(root, load_task({**UNDECIDED, **learnt, "size": list(answers.size or [64] * dims)}))
    modality, why = _modality(found, seen, answers)
    kind = Choice("modality", modality, why)
    if seen.settings["kind"] == "segmentation":
        proposed = _segmentation(found, modality, answers, learnt["name"])
    else:
        proposed = _classification(found, modality, answers, learnt)
    if answers.network:
        changed = Choice("network", {"name": answers.network}, "as said")
        proposed = _changed(proposed, [changed])
    proposed = dataclasses.replace(proposed, choices=(*seen.choices, kind, *proposed.choices), warnings=_warnings(found))
    proposed = _with_pretrained(proposed, found, answers)
    check_task(load_task(proposed.settings))
    return proposed


def _warnings(found: Sequence[DatasetFingerprint]) -> tuple[str, ...]:
    """Sites whose training images show a class too rarely."""
    shown = {item.site: {name: presence.images or 0 for name, presence in item.classes.items()} for item in found}
    return tuple(f"{site}: {scarce_line(few)}" for site, images in shown.items() if (few := scarce(images)))


def _modality(found: Sequence[DatasetFingerprint], seen: Seen, answers: Answers) -> tuple[Modality, str]:
    if answers.modality is not None:
        return answers.modality, "as said"
    if seen.pictures:
        return "photo", "pictures whose numbers begin at 0"
    lowest = min(channel.overall.p0_5 for item in found for channel in item.channels)
    if lowest < _AIR and seen.settings["channels"] == 1:
        return "ct", f"intensities down to {lowest:g}, as Hounsfield units have them for air"
    return "mr", "numbers without a unit; --modality ct where they are Hounsfield units"


def _changed(proposed: Plan, changes: Sequence[Choice], without: Sequence[str] = ()) -> Plan:
    """With some settings changed and others left out."""
    gone = {change.setting for change in changes} | set(without)
    settings = {name: value for name, value in proposed.settings.items() if name not in without}
    settings |= {change.setting: change.value for change in changes}
    kept = (choice for choice in proposed.choices if choice.setting not in gone)
    return dataclasses.replace(proposed, settings=settings, choices=(*kept, *changes))


# -- masks -----------------------------------------------------------------------------------------------------------------


def _segmentation(found: Sequence[DatasetFingerprint], modality: Modality, answers: Answers, name: str) -> Plan:
    """nnU-Net's rules; a size that was said means whole images, shrunk, and a small U-Net."""
    planned = plan(found, modality=modality, memory=answers.memory, name=name)
    if not answers.size:
        return planned
    levels = next((count for count in (4, 3) if all(side % 2 ** (count - 1) == 0 for side in answers.size)), 2)
    width = [16 * 2**level for level in range(levels)]
    changes = [
        Choice("image_mode", "resize", "a size was said: every image is shrunk to it, quick and less sharp than patches"),
        Choice("size", list(answers.size), "as said"),
        Choice("network", {"name": "unet", "channels": width, "norm": "instance"}, f"a small U-Net of {levels} levels, for a CPU too"),
        Choice("optimizer", {"name": "adam", "lr": 0.005}, "a small network takes larger steps (medflare's own rule)"),
        Choice("batch_size", _batch(found), _BATCH_REASON),
    ]
    return _changed(planned, changes, ["patches_per_image", "spacing"])


_BATCH_REASON: Final = f"an eighth of the smallest site's images, from 2 to {_BATCH} (medflare's own rule)"


def _batch(found: Sequence[DatasetFingerprint]) -> int:
    return max(2, min(_BATCH, min(item.images for item in found) // 8))


# -- classes ---------------------------------------------------------------------------------------------------------------


def _classification(found: Sequence[DatasetFingerprint], modality: Modality, answers: Answers, learnt: dict[str, Any]) -> Plan:
    """medflare's own rules: images resized, a network by their number, every class as often as the others where few show one."""
    dims, images = learnt["spatial_dims"], sum(item.images for item in found)
    size, why = _size(found, answers, dims)
    shown = {name: sum(item.classes[name].images or 0 for item in found) for name in found[0].classes}
    ordered = sorted(shown, key=shown.__getitem__)
    few, many = ordered[0], ordered[-1]
    skewed = learnt["target"] == "multiclass" and shown[many] > _SKEWED * shown[few]
    small = images < _FEW or max(size) < 2 * _STEP
    network = "small_cnn" if small else "resnet18"
    rotated = [0.2] * (1 if dims == 2 else 3)
    augment = [
        {"name": "RandFlip", "prob": 0.5, "spatial_axis": dims - 1},
        {"name": "RandAffine", "prob": 0.5, "rotate_range": rotated, "scale_range": [0.1] * dims, "padding_mode": "border"},
    ]
    sampling = f"{many} is shown {shown[many]} times, {few} {shown[few]} times"
    choices = (
        Choice("size", size, why),
        Choice(
            "intensity", _scaled(found, modality), "the same for all images" if modality != "mr" else "every image to mean 0, deviation 1"
        ),
        Choice("network", {"name": network}, f"{images} training images{' are few for a large network' if small else ''}"),
        Choice("augment", augment, "mirrored, turned and scaled a little; take RandFlip out where left and right differ"),
        Choice("sampling", "balanced" if skewed else "shuffle", f"{sampling}{'; every class is drawn as often as the others' * skewed}"),
        Choice("loss", {"name": "ce"}, "cross entropy"),
        Choice("optimizer", {"name": "adam", "lr": 0.001}, "Adam with its usual rate"),
        Choice("batch_size", _batch(found), _BATCH_REASON),
        Choice("local_epochs", 1, "a round is an epoch of the site's images"),
        Choice("metric", "f1_macro", "a rare class counts as much as a common one"),
    )
    return Plan(learnt | {choice.setting: choice.value for choice in choices}, choices, source="")


def _with_pretrained(proposed: Plan, found: Sequence[DatasetFingerprint], answers: Answers) -> Plan:
    """A network that starts from weights that a package brings, for grey and colour pictures; a line on the package where it is missing.

    Raises:
        ConfigError: they are asked for, and there are none for these images.
    """
    settings, name = proposed.settings, answers.network or _PRETRAINED
    known = PACKAGED.get(name)
    if known is None:
        if answers.pretrained:
            packaged_weights(name)
        return proposed
    pictures = settings["kind"] == "classification" and settings["spatial_dims"] == 2 and settings["channels"] in (1, known.channels)
    if not pictures or min(settings["size"]) < known.step:
        if answers.pretrained:
            raise ConfigError(f"--pretrained: the weights of {name} are for classes of pictures of {known.step} pixels a side or more")
        return proposed
    if known.path is None and not answers.pretrained:
        text = f"the network starts from random weights; {INSTALL} brings pretrained ones, which this command then proposes"
        return dataclasses.replace(proposed, warnings=(*proposed.warnings, text))
    changes = [
        Choice("network", {"name": name, "weights": packaged_weights(name)}, "starts from weights of ImageNet, which a package brings"),
        Choice("channels", known.channels, "grey is repeated: the weights were learnt on colour"),
        Choice("intensity", scaled_for(known, settings["intensity"]), "the scale that the weights were learnt with"),
    ]
    if sum(item.images for item in found) < _FEW:
        reason = "few training images teach a head more than the whole network (medflare's own rule); fedavg, fedprox and robust know it"
        changes.append(Choice("freeze", ["body"], f"{reason}, leave it out for others"))
    if not answers.size:
        size = [max(known.step, side // known.step * known.step) for side in settings["size"]]
        changes.append(Choice("size", size, f"as the images, in steps of {known.step}: the weights need them"))
    return _changed(proposed, [change for change in changes if settings.get(change.setting) != change.value])


def _size(found: Sequence[DatasetFingerprint], answers: Answers, dims: int) -> tuple[list[int], str]:
    if answers.size:
        return list(answers.size), "as said"
    median = pooled([item.sizes for item in found], [item.images for item in found], 50)
    scale = min(1.0, _LARGEST[dims] / max(median))
    size = [max(_STEP, round(side * scale / _STEP) * _STEP) for side in median]
    image = " x ".join(f"{side:g}" for side in median)
    return size, f"the median image is {image}; at most {_LARGEST[dims]} a side, in steps of {_STEP}"


def _scaled(found: Sequence[DatasetFingerprint], modality: Modality) -> dict[str, Any]:
    if modality != "ct":
        value: dict[str, Any] = intensity(found, modality).value
        return value
    spreads = [channel.overall for item in found for channel in item.channels]  # without masks there is no foreground to go by
    low, high = min(spread.p0_5 for spread in spreads), max(spread.p99_5 for spread in spreads)
    return {"name": "ScaleIntensityRange", "a_min": low, "a_max": max(high, low + 1), "b_min": 0.0, "b_max": 1.0, "clip": True}
