"""The votes on the models that all sites share: left in the outcome, and held against each other, when the last one is in."""

from collections.abc import Mapping
from typing import Any

from medflare.core.events import EventLog
from medflare.federation.outcome import Outcome
from medflare.methods.base import ServerHalf
from medflare.methods.parts.selection import FEW_IMAGES, contradictions, images_behind


def close_elections(server: ServerHalf[Any], outcome: Outcome, events: EventLog) -> None:
    """Keep who voted what on the delivered models, name the sites whose votes contradict the others', and choices on few images.

    Args:
        server: has taken all votes.
        outcome: takes the elections.
        events: takes the names.
    """
    for model, election in server.elections().items():
        outcome.elections[model] = {"round": election.round, "rule": election.rule, "candidates": election.record}
        for site, (round, loss) in ({} if election.rivals else contradictions(election.record)).items():
            text = (
                f"its votes on the {model} model contradict the others': by them the model after {round} rounds would be delivered, "
                f"which is {loss:.3f} below the best by the others' median"
            )
            events.add("suspicious", text, site=site)
    _doubt(server, outcome, events)


def _doubt(server: ServerHalf[Any], outcome: Outcome, events: EventLog) -> None:
    """An event for every choice that rests on fewer than ten validation images: of all sites together, and of each that chooses alone."""
    if getattr(server.hyper, "selection", "last") == "last":  # a survey has no such setting
        return
    images = {site: enrolled["n"]["validation"] for site, enrolled in outcome.enrolled.items() if enrolled["role"] == "inside"}
    for model, election in outcome.elections.items():
        voters = sorted({site for candidate in election["candidates"] for site in candidate["votes"]})
        behind = {site: images[site] for site in voters if site in images}
        if election["candidates"] and images_behind(behind, election["rule"]) < FEW_IMAGES:
            told = ", ".join(f"{site} {count}" for site, count in behind.items()) or "none"
            events.add("few_validation_images", f"the round of the {model} model was chosen by votes on few validation images ({told})")
    for site in sorted(images):
        alone = sorted(_validated(outcome.history, site) - outcome.elections.keys())
        if alone and images[site] < FEW_IMAGES:
            text = f"its {' and '.join(alone)} model was chosen on {images[site]} validation images of its own"
            events.add("few_validation_images", text, site=site)


def _validated(history: list[dict[str, Any]], site: str) -> set[str]:
    """The models that a site has measured on validation images after a round of training."""
    reports: list[Mapping[str, Any]] = [line["sites"].get(site, {}) for line in history if line["round"] > 0]
    return {model for facts in reports for model in facts.get("validation") or {}}
