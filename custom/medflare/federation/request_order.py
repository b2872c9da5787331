"""What a server may ask a site next: the steps of the job's schedule, in their order, each once, or
the last one again.

Each reply measures models on the site's images. A server that may ask in any order, as often as it
likes and with any models, can find out which patients a site has.
"""

import hashlib
import json
from dataclasses import dataclass, field

import torch

from medflare.core.errors import MessageError, StateError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.core.store import Store, states_digest
from medflare.core.text import Json
from medflare.data.local import PLACE
from medflare.federation.builtin_messages import (
    ADAPT,
    FEDERATION_SHARES,
    FINISHED,
    ROLE,
    RUN_ROUNDS,
    SITES,
    STEP,
)
from medflare.federation.settings import CROSS_SITE, FINALIZE, step_name
from medflare.methods.base import Plan, ServerContext, SiteAlgorithm, Step
from medflare.methods.method import Method

_STORED = "request"  # name of the last request in the site's store
_MANY = 10**9  # more than the rounds and steps of any run
# Phase of every run -> its position after the schedule.
_ENDINGS = {FINALIZE: _MANY, CROSS_SITE: _MANY + 1}
_NOTHING = {"step": -1, "phase": "", "round": -1, "rounds": _MANY, "position": -1}


class _ScheduleContext(ServerContext):
    """A server algorithm's context for its schedule alone: no initial weights are drawn."""

    def initial_state(
        self, purpose: str = "model", spec: Json | None = None, outputs: int | None = None
    ) -> StateDict:
        template = self.plan.template(spec, outputs)
        return {name: torch.zeros_like(tensor, device="cpu") for name, tensor in template.items()}


def schedule_of(method: Method, plan: Plan, seed: int, rounds: int) -> list[Step]:
    """The steps of a run of so many rounds with outside sites; a run without them may lack the last
    ones.

    The list is empty for a method that does not train: its server algorithm needs what only the
    server has.
    """
    if not method.trains:
        return []
    context = _ScheduleContext(plan, seed, rounds, ("outside",), phases=method.site_class.phases)
    return method.make_server(context).steps()


@dataclass
class RequestOrder:
    """Admits the requests of one run at a site, over all processes of the site.

    Args:
        site: its name.
        store: keeps the last request.
        method: of the job.
        most_rounds: `Bounds.rounds`.
    """

    site: str
    store: Store
    method: Method
    most_rounds: int
    # By inside sites and rounds.
    _schedules: dict[tuple[tuple[str, ...], int], list[Step]] = field(default_factory=dict)

    def note_enrolment(self, round: int, invitation: Message) -> None:
        """Note the round in which the server enrolled the site first, and with what.

        Raises:
            MessageError: after the first step, an enrolment with another role, other sites or
                another start, or one that begins a finished run anew.
        """
        start = states_digest(invitation.states)
        membership = [invitation[ROLE], list(invitation[SITES]), start]
        stored = self.store.load(_STORED)
        if stored is None or stored.meta["step"] < 0:
            noted = _NOTHING if stored is None else stored.meta
            meta = {"enrolled": round, **noted, "place": membership}
            self.store.save(_STORED, Message({}, meta))
            return
        has_trained = self.method.trains and stored.meta["enrolled"] < stored.meta["rounds"]
        has_ended = has_trained and stored.meta["phase"] in _ENDINGS
        # It would lose what the site has learnt.
        if has_ended and (invitation.get(FINISHED) or 0) < stored.meta["step"]:
            raise MessageError(f"site {self.site} has finished this run; start a new job")
        if stored.meta["place"] != membership:
            raise MessageError(
                f"site {self.site} has enrolled in this run with another role, other sites or "
                "another start; start a new job"
            )

    def admit(
        self,
        phase: str,
        round: int,
        incoming: Message,
        run_items: Message,
        algorithm: SiteAlgorithm,
    ) -> bool:
        """Check a request and note it as the last one; return whether it repeats the last one.

        A site may miss steps. A repeated step has the same number, models and metadata.

        Args:
            run_items: of `RUN_META`. The rounds of the run may become fewer (early stopping), not
                more.
            algorithm: the one that replies.

        Raises:
            MessageError: the request is not in the schedule after the last one, or it asks for the
                last step with other models, metadata or another adaptation.
        """
        step = run_items[STEP]
        rounds = run_items[RUN_ROUNDS]
        refused = f"site {self.site} refuses {step_name(phase, round, rounds)}"

        # 1. The rounds of the run.
        if rounds > self.most_rounds:
            raise MessageError(
                f"{refused}: the run has {rounds} rounds, "
                f"bounds.rounds in its {PLACE} allows {self.most_rounds}"
            )
        stored = self.store.load(_STORED)
        if stored is None:
            raise StateError(
                f"site {self.site} has not enrolled, or its state is lost; start the run again"
            )
        last = stored.meta
        if rounds > last["rounds"]:
            raise MessageError(
                f"{refused}: the run has {rounds} rounds, and had {last['rounds']} before"
            )

        # 2. The last step again.
        meta = json.dumps(incoming.meta, sort_keys=True)
        adaptation = {}  # on which an evaluation depends
        for item in (ADAPT, FEDERATION_SHARES):
            if item in run_items:
                adaptation[item.name] = run_items[item]
        request = {
            "phase": phase,
            "round": round,
            "digest": states_digest(incoming.states),
            "adaptation": json.dumps(adaptation),
            "meta": hashlib.sha256(meta.encode()).hexdigest(),
        }
        if (step, phase) == (last["step"], last["phase"]):
            if request.items() <= last.items():
                return True
            raise MessageError(
                f"{refused}: the same step was asked before, with other models, "
                "other metadata, another adaptation or in another round"
            )

        # 3. A later step of the schedule.
        trains = self.method.trains and self.site in algorithm.plan.sites
        in_time = last["enrolled"] < rounds  # it enrolled before the last round ended
        if phase == FINALIZE and trains and in_time and last["position"] < 0:
            raise MessageError(f"{refused}: the site was asked for no step of the schedule before")
        position = self._position(phase, round, rounds, last["position"], algorithm)
        if position is None or step < last["step"]:
            before = ""
            if last["phase"]:
                before = f", after {step_name(last['phase'], last['round'], rounds)}"
            raise MessageError(
                f"{refused}: the schedule of {rounds} rounds has no such step now{before}"
            )
        noted = {**last, **request, "step": step, "rounds": rounds, "position": position}
        self.store.save(_STORED, Message({}, noted))
        return False

    def _position(
        self, phase: str, round: int, rounds: int, last: int, algorithm: SiteAlgorithm
    ) -> int | None:
        """The first position of a phase and round in the schedule after the position `last`, or
        None.
        """
        if phase in _ENDINGS:
            return _ENDINGS[phase] if _ENDINGS[phase] > last and round == rounds else None
        plan = algorithm.plan
        key = plan.sites, rounds
        if key not in self._schedules:
            self._schedules[key] = schedule_of(self.method, plan, algorithm.site.seed, rounds)
        if not self._schedules[key]:  # not known: any step until the end
            return None if last >= _ENDINGS[FINALIZE] else last + 1
        for position, step in enumerate(self._schedules[key]):
            if position > last and (step.phase, step.round) == (phase, round):
                return position
        return None
