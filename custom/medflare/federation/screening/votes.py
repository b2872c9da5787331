"""The votes on the models that all sites share: left in the outcome, and held against each other, when the last one is in."""

from typing import Any

from medflare.core.events import EventLog
from medflare.federation.outcome import Outcome
from medflare.methods.base import ServerHalf
from medflare.methods.parts.selection import contradictions


def close_elections(server: ServerHalf[Any], outcome: Outcome, events: EventLog) -> None:
    """Keep who voted what on the delivered models, and name the sites whose votes contradict the others'.

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
