"""What the sites have, before anything is planned: every site says its dataset's fingerprint, and nobody trains.

It stands on the shelf of methods since it is one to every engine, with a schedule of a single step. What a fingerprint holds, and what a
site with `minimum_patients` keeps back of it, stands in `data.checking.fingerprint`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from pydantic.dataclasses import dataclass

from medflare.core.errors import DataError
from medflare.core.manifest import MetaSpec, Phase
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.data.checking.fingerprint import DatasetFingerprint, fingerprint_of, from_json, learnt_of, to_json
from medflare.methods.base import ServerAlgorithm, SiteAlgorithm, SiteHyper, Step
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig

METHOD = Method(
    name="fingerprint",
    title="What the sites have, in numbers; nobody trains",
    paper="what is planned from them: Isensee et al., nnU-Net, Nature Methods 18, 2021",
    site="medflare.methods.baselines.fingerprint:FingerprintSite",
    server="medflare.methods.baselines.fingerprint:FingerprintServer",
    trains=False,
)
FILE: Final = "fingerprints.json"
_KNOWN: Final = ("site", "learnt")  # of a fingerprint, what the server knows without asking


def _whole(value: Mapping[str, Any], site: str, learnt: dict[str, Any]) -> DatasetFingerprint:
    return from_json({**value, "site": site, "learnt": learnt})


def _numbers(value: object) -> str | None:
    """Takes the numbers of a fingerprint, or none at all from a site that keeps them back."""
    if not isinstance(value, Mapping) or set(_KNOWN) & value.keys():
        return "is no table of a fingerprint's numbers"
    try:
        _ = _whole(value, "", {}) if value else None
    except DataError as error:
        return str(error)
    return None


FINGERPRINT = MetaSpec("fingerprint", "sizes, spacings, intensities and classes of the training images", _numbers, "train")


class FingerprintSite(SiteAlgorithm[SiteHyper]):
    """Reads the site's training images as they are stored and says their numbers."""

    server_hyper: ClassVar[type] = object
    phases: ClassVar[tuple[Phase, ...]] = (Phase("describe", reply_meta=(FINGERPRINT,)),)
    dp_unsupported_reason: ClassVar[str] = "its numbers carry no noise"

    def describe(self, round: int, incoming: Message) -> Message:
        """The fingerprint without what the server knows; nothing where the training images are of too few patients.

        Raises:
            DataError: an image cannot be used, or the site has its images in memory alone.
        """
        site = self.site
        if site.source is None:
            raise DataError(f"site {site.name}: its images were made in memory; a fingerprint is of stored ones, see open_site")
        found = fingerprint_of(site.name, site.task, site.source, self.minimum_patients, site.abort)
        numbers = {} if found is None else json.loads(json.dumps(dataclasses.asdict(found)))
        return Message({}, {FINGERPRINT: {name: value for name, value in numbers.items() if name not in _KNOWN}})

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """No model."""
        return {}


@dataclass(frozen=True, config=STRICT)
class FingerprintServerHyper:
    """None."""


class FingerprintServer(ServerAlgorithm[Any]):
    """Collects the fingerprints into a file that `medflare task plan` reads, and into a table."""

    Hyper: ClassVar[type] = FingerprintServerHyper

    def steps(self) -> list[Step]:
        """One question to all."""
        return [Step("describe", self.context.rounds, everyone=True)]

    def configure(self, step: Step, site: str) -> Message:
        """Nothing: the task says what there is to look at."""
        return Message()

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Keep what can be planned with; an event names every other site."""
        task, events, kept = self.context.task, self.context.events, {}
        for site, reply in replies.items():
            numbers = reply.meta.get(FINGERPRINT)
            if not numbers:
                text = "tells no numbers of its training images, which are of fewer patients than it lets be told of (minimum_patients)"
                events.add("warning", text, site=site, round=step.round)
                continue
            found = _whole(numbers, site, learnt_of(task))
            if problem := _unlike(found, task, self.context.site_counts[site]["n"]["train"]):
                events.add("rejected", f"fingerprint not used: {problem}", site=site, round=step.round)
                continue
            kept[site] = to_json([found])["sites"][0]
        self.memory.meta["fingerprints"] = kept

    def configure_final(self, site: str) -> Message:
        """Nothing."""
        return Message()

    @property
    def _found(self) -> list[DatasetFingerprint]:
        return [from_json(item) for _, item in sorted(self.memory.meta["fingerprints"].items())]

    def documents(self) -> dict[str, Any]:
        """The file of fingerprints."""
        return {FILE: to_json(self._found)}

    def tables(self) -> dict[str, dict[str, dict[str, Any]]]:
        """One row a site, also where it told no numbers."""
        rows = {site: {"images": counts["n"]["train"], "patients": "not told"} for site, counts in self.context.site_counts.items()}
        return {"Training images": {**rows, **{found.site: row_of(found) for found in self._found}}}


def _unlike(found: DatasetFingerprint, task: TaskConfig, images: int) -> str:
    """In what a fingerprint is not one of this task and this site, "" where it is."""
    names = task.labels if task.kind == "segmentation" else task.classes
    axes = {len(spread.median) for spread in (found.sizes, found.spacings, found.extents) if spread is not None}
    if found.images != images:
        return f"of {found.images} images, the site enrolled with {images}"
    if (len(found.channels), axes) != (task.image_channels, {task.spatial_dims}):
        return "its channels or axes are not the task's"
    return "" if found.classes.keys() == set(names) else "its classes are not the task's"


def row_of(found: DatasetFingerprint) -> dict[str, Any]:
    """A fingerprint as a row of a table: column -> number or text.

    Returns:
        Counts; medians of size and spacing by axis; median intensity of every channel with its percentiles 0.5 and 99.5; images that show
        a class, with its share of all voxels.
    """

    def by(sides: Sequence[float]) -> str:
        return " x ".join(f"{side:.4g}" for side in sides)

    row: dict[str, Any] = {"images": found.images, "patients": found.patients, "size": by(found.sizes.median)}
    row["spacing, mm"] = "unknown" if found.spacings is None else by(found.spacings.median)
    names = found.learnt.get("channels")
    labels = names if isinstance(names, list | tuple) else [str(number) for number in range(len(found.channels))]
    for label, seen in zip(labels, (channel.overall for channel in found.channels), strict=True):
        row[f"channel {label}"] = f"{seen.median:.4g} ({seen.p0_5:.4g} to {seen.p99_5:.4g})"
    for name, presence in found.classes.items():
        share = "" if presence.share is None else f" ({presence.share:.1%})"
        row[f"class {name}"] = "not told" if presence.images is None else f"{presence.images}{share}"
    return row
