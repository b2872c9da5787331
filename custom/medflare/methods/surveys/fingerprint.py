"""A method that trains nothing: each site sends the fingerprint of its training images.

`medflare task plan` reads it. What a fingerprint holds, and what a site with `minimum_patients`
holds back, is in `preparation.fingerprint`.
"""

from typing import Annotated

from pydantic import AfterValidator

from medflare.core.errors import DataError
from medflare.core.message import FinalModels
from medflare.core.text import JsonDict
from medflare.methods import (
    Message,
    MetaSpec,
    Replies,
    ServerAlgorithm,
    SiteAlgorithm,
    SiteHyper,
    Step,
    handles,
    phase,
)
from medflare.preparation.fingerprint import fingerprint_of, from_json, learnt_of, to_json

FILE = "fingerprints.json"


def _check_fingerprint(value: JsonDict) -> JsonDict:
    """Raise ValueError for a value that is no fingerprint; an empty one, of a site with too few
    patients, is valid.
    """
    try:
        if value:
            from_json(value)
    except DataError as error:
        raise ValueError(str(error)) from None
    return value


FINGERPRINT = MetaSpec[JsonDict](
    "fingerprint",
    "sizes, spacings, intensities and classes of the training images",
    Annotated[JsonDict, AfterValidator(_check_fingerprint)],
    "train",
)


class FingerprintSite(SiteAlgorithm[SiteHyper]):
    """Reads the site's training images as they are stored and sends their fingerprint."""

    server_hyper = object
    dp_unsupported_reason = "a fingerprint carries no noise"
    accumulates = True  # a task may set what only training needs
    freezes = True

    @phase(meta=(FINGERPRINT,))
    def describe(self, round: int, incoming: Message) -> Message:
        """Sends the fingerprint of the training images, empty if they are of fewer than
        `minimum_patients` patients.

        Raises:
            DataError: an image cannot be used, or the site has its images in memory only.
        """
        site = self.site
        if site.source is None:
            raise DataError(
                f"site {site.name}: a fingerprint needs stored images, these were made in memory; "
                "see open_site"
            )
        fingerprint = fingerprint_of(
            site.name, site.task, site.source, self.minimum_patients, site.abort
        )
        described = {}
        if fingerprint is not None:
            described = to_json([fingerprint])["sites"][0]
        return Message.of({FINGERPRINT: described})

    def finalize(self, incoming: Message) -> FinalModels:
        return {}


class FingerprintServer(ServerAlgorithm):
    """Collects the fingerprints in a file that `medflare task plan` reads."""

    Hyper = SiteHyper  # none
    freezes = True

    def steps(self) -> list[Step]:
        return [self.final_step(FingerprintSite.describe)]

    @handles(FingerprintSite.describe)
    def collect(self, step: Step, replies: Replies) -> None:
        """Store the fingerprints; an event names each site without one."""
        learnt = learnt_of(self.context.task)
        fingerprints = {}
        for site, reply in sorted(replies.items()):
            described = reply.get(FINGERPRINT)
            if described:
                fingerprints[site] = {**described, "site": site, "learnt": learnt}
            else:
                text = "sends no fingerprint: fewer patients than its minimum_patients"
                self.context.warn(text, site=site, round=step.round)
        self.memory.meta["fingerprints"] = fingerprints

    def configure_final(self, site: str) -> Message:
        return Message()

    def documents(self) -> JsonDict:
        stored = sorted(self.memory.meta["fingerprints"].items())
        return {FILE: to_json([from_json(item) for _, item in stored])}

    def tables(self) -> dict[str, dict[str, JsonDict]]:
        """One row a site: images, and patients and median size if the site sent a fingerprint."""
        counts = self.context.site_counts
        rows: dict[str, JsonDict]
        rows = {site: {"images": counts[site]["n"].get("train")} for site in counts}
        for site, item in self.memory.meta["fingerprints"].items():
            size = " x ".join(f"{side:.4g}" for side in item["sizes"]["median"])
            rows[site] |= {"patients": item["patients"], "median size": size}
        return {"Training images": rows}
