"""The gate at a site: what a server may send it, before any method sees it.

The same checks as at the server, against what the phase declares that the server sends and tells. A message that does not pass costs
the site nothing but the task: nothing of it has been used.
"""

from typing import Any, Final

from medflare.core.errors import MessageError
from medflare.core.manifest import Entry, EntrySpec, Fact, Phase, count, listing, negative, non_finite, number, table, text, violation
from medflare.core.message import Message
from medflare.federation.screening.plain import not_plain, not_states, shown
from medflare.federation.screening.replies import RANGE, unfit
from medflare.federation.screening.rounding import WIRE, Rounding
from medflare.federation.settings import DELIVER, ENROL
from medflare.methods.base import Plan, SiteHalf

_TOLD: Final = 2**18  # bytes of facts: names of all sites and their rounds, and no model
ROLE, SITES, FINISHED, STEPS = "role", "sites", "finished", "steps"  # what an invitation says
INVITES: Final = (
    Fact(ROLE, "what the site is to be", text("inside", "outside")),
    Fact(SITES, "the inside sites, sorted", listing(text(), 10_000)),
    Fact(FINISHED, "steps that were done before", count(), sometimes=True),
    Fact(STEPS, "steps of the run", count(10**9), sometimes=True),
    Fact("method", "whose halves run", text(), sometimes=True),
    Fact("hyper", "all hyper-parameters", table(), sometimes=True),
    Fact("task", "the task's fingerprint", text(), sometimes=True),
    Fact("seed", "of the run", number(), sometimes=True),
)
NUMBERED: Final = (Fact("step", "its number in the run", count(10**9)), Fact("run_rounds", "rounds of the run", count(10**9)), WIRE)


def uninviting(message: Message, name: str) -> str | None:
    """What the facts of an invitation to enrol cannot mean, in words, or None.

    Args:
        message: the server's, see `unreadable`.
        name: of the site.
    """
    if problem := _untold(message, INVITES):
        return problem
    sites, inside = message.facts[SITES], message.facts[ROLE] == "inside"
    if not sites or sorted(set(sites)) != list(sites):
        return f"fact {SITES!r} is no sorted list of different names"
    if inside != (name in sites):
        return f"fact {ROLE!r} is {message.facts[ROLE]!r}, but {name} is {'not ' if inside else ''}among the sites that train"
    return None


def unreadable(message: Message) -> str | None:
    """What of a server's message nobody can work with, in words, or None.

    Args:
        message: the server's.
    """
    return not_states(message.states) or not_plain(message.facts, _TOLD)


def unnumbered(message: Message) -> str | None:
    """What is wrong with the place of a step in the run, in words, or None.

    Args:
        message: the server's, see `unreadable`.
    """
    return _untold(Message({}, {fact: message.facts[fact] for fact in NUMBERED if fact in message.facts}), NUMBERED)


def misplaced(asked: tuple[int, str, int], latest: tuple[int, str, int] | None, steps: int | None) -> str | None:
    """Why a step cannot be one of the run, in words, or None.

    Args:
        asked: number of the step, its phase and its round.
        latest: those of the step that was asked last; None: there was none.
        steps: of the run; the delivery comes after them. None: nobody knows.

    Examples:
        >>> misplaced((4, "train", 4), (3, "train", 3), steps=5), misplaced((3, "train", 3), (3, "train", 3), steps=5)
        (None, None)
        >>> misplaced((6, "train", 4), (3, "train", 3), steps=5)
        'its step is 6, the run that the site enrolled in has 5 and a delivery'
        >>> misplaced((4, "train", 0), (3, "train", 3), steps=5)
        "its step 4 is 'train' of round 0, after step 3, 'train' of round 3"
        >>> misplaced((5, "deliver", 2), (4, "train_selector", 3), steps=5)
    """
    step, phase, round = asked
    if steps is not None and step > steps:
        return f"its step is {step}, the run that the site enrolled in has {steps} and a delivery"
    if latest is None or step < latest[0]:
        return None
    before, earlier, begun = latest
    goes_back = round < begun and phase != DELIVER  # a delivery is of the federation's last round, whatever came after it
    if goes_back or (step == before and (phase, round) != (earlier, begun)):
        return f"its step {step} is '{phase}' of round {round}, after step {before}, '{earlier}' of round {begun}"
    return None


class SiteGate:
    """What the messages of a server pass at one site, or a MessageError that names the site, the step and the rule.

    Args:
        name: of the site.
    """

    def __init__(self, name: str):
        self.name = name
        self._known: Incoming | None = None
        self._latest: tuple[int, str, int] | None = None  # step, phase and round of what was asked last

    def refuse_invitation(self, round: int, message: Message) -> None:
        """Nothing where an invitation can be meant, as far as that is known before the site's task is.

        Args:
            round: in which it came.
            message: the server's.

        Raises:
            MessageError: it cannot.
        """
        self._refuse(ENROL, round, _unreadable(round, message) or uninviting(message, self.name))
        self._latest = None

    def refuse_start(self, round: int, message: Message, plan: Plan[Any, Any], start: str) -> None:
        """Nothing where an invitation holds weights to start from that fit the network, if the task names some, and else none.

        Args:
            round: in which it came.
            message: the server's, see `refuse_invitation`.
            plan: of the site.
            start: the entry that holds them.

        Raises:
            MessageError: it does not.
        """
        sends = (Entry(start),) if plan.task.network.get("weights") else ()
        self._refuse(ENROL, round, Incoming(plan).refusal(Phase(ENROL, sends=sends, tells=INVITES), message))

    def numbers(self, phase: str, round: int, message: Message, steps: int | None = None) -> tuple[int, int, bool]:
        """(number of the step in the run, rounds of the run, whether weights are rounded), which are taken out of the message.

        A step may be asked again, and after an interruption an earlier one.

        Args:
            phase: of the step.
            round: of the step.
            message: the server's.
            steps: of the run, as the site was told when it enrolled; None: it was not told.

        Raises:
            MessageError: nobody can work with the message, it has no such numbers, or they are none of this run.
        """
        self._refuse(phase, round, _unreadable(round, message) or unnumbered(message))
        step, rounds, wire = (message.facts.pop(fact, None) for fact in NUMBERED)
        self._refuse(phase, round, misplaced((step, phase, round), self._latest, steps))
        self._latest = step, phase, round
        return step, rounds, wire is not None

    def trained_on(self, phase: str, round: int, message: Message) -> dict[str, Any] | None:
        """What the final models were trained on, taken out of the message that comes with them; None where it does not say.

        Args:
            phase: of the step.
            round: of the step.
            message: the server's.

        Raises:
            MessageError: nobody can work with the message, or it says something else there.
        """
        self._refuse(phase, round, _unreadable(round, message))
        if phase != DELIVER or RANGE not in message.facts:
            return None
        self._refuse(phase, round, unfit(Message({}, {RANGE: message.facts[RANGE]}), (RANGE,)))
        return message.facts.pop(RANGE)

    def refuse(self, phase: str, round: int, message: Message, half: SiteHalf[Any], rounded: bool = False) -> None:
        """Nothing where a message is as its phase declares and agrees with the half's plan.

        Args:
            phase: of the step; "deliver" for the final models.
            round: of the step.
            message: the server's, see `numbers`.
            half: that will work with it.
            rounded: whether its weights are, see `Rounding`.

        Raises:
            MessageError: it is not.
        """
        declared = half.delivery if phase == DELIVER else half.phase(phase)
        if declared is None:
            return
        if self._known is None or self._known.plan is not half.plan:
            self._known = Incoming(half.plan)
        self._refuse(phase, round, self._known.refusal(declared, message, rounded) or half.contradicted(message))

    def _refuse(self, phase: str, round: int, problem: str | None) -> None:
        if problem is not None:
            raise MessageError(f"site {self.name} does not take what the server sent for '{phase}' of round {round}: {problem}")


def _unreadable(round: object, message: Message) -> str | None:
    return unreadable(message) or (None if type(round) is int and round >= 0 else "its round is no count")


class Incoming:
    """What a server's messages may hold under a plan.

    Args:
        plan: of the site's half.
    """

    def __init__(self, plan: Plan[Any, Any]):
        self.plan = plan
        self._specs: dict[tuple[str, int, bool], EntrySpec] = {}  # the networks behind them are built once, not once a step

    def refusal(self, phase: Phase, message: Message, rounded: bool = False) -> str | None:
        """What of a message is not as its phase declares, in words, or None.

        Args:
            phase: says what the server sends and tells.
            message: the server's, see `unreadable`, without what `federation.exchange.numbered` adds.
            rounded: whether its weights are, see `Rounding`.
        """
        sent = {place: entry for place, entry in enumerate(phase.sends) if entry.when(self.plan)}
        needed = [entry for entry in sent.values() if not entry.sometimes and not entry.endswith("/")]
        if missing := [entry for entry in needed if entry not in message.states]:
            return f"missing entry {shown(missing[0])}"
        for name in message.states:
            places = [place for place, entry in sent.items() if self._covers(entry, name)]
            if problem := self._misfit(phase, places, name, message, rounded):
                return problem
        return _untold(message, phase.tells)

    def _covers(self, entry: Entry, name: str) -> bool:
        """Whether it is this entry, or one of its family's; a family has a member for every inside site."""
        return entry.covers(name) and (not entry.endswith("/") or name.removeprefix(entry) in self.plan.sites)

    def _misfit(self, phase: Phase, places: list[int], name: str, message: Message, rounded: bool) -> str | None:
        """Why an entry is none of those that the phase declares at these places, in words, or None."""
        part, problem = Message({name: message.states[name]}), f"unexpected entry {shown(name)}"
        for place in places:
            manifest = {name: self._spec(phase, place, rounded)}
            problem = violation(part, manifest) or non_finite(part) or negative(part, manifest) or ""
            if not problem:
                break
        return problem or None

    def _spec(self, phase: Phase, place: int, rounded: bool) -> EntrySpec:
        """What the phase declares at a place, as it travels."""
        asked = phase.name, place, rounded
        if asked not in self._specs:
            spec = phase.sends[place].spec(self.plan)
            self._specs[asked] = Rounding(self.plan).sent(phase.sends[place], spec) if rounded else spec
        return self._specs[asked]


def _untold(message: Message, tells: tuple[Fact, ...]) -> str | None:
    return unfit(message, tells, tuple(fact for fact in tells if not fact.sometimes))
