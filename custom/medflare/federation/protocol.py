"""Checks of messages: their form, whether they are as declared, and requests at a site.

The server checks every reply and every site every request before a method sees it, and the guard
checks again what leaves a site. The parties are honest, but may have a full disk, another version
or a different method.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medflare.core.errors import MessageError
from medflare.core.message import Message
from medflare.core.phases import Items, Phase, name_difference
from medflare.core.specs import Manifest, MetaSpec, TensorSpec
from medflare.core.states import StateDict
from medflare.core.text import LARGEST_INT, is_site_name, shown
from medflare.federation.builtin_messages import (
    CROSS_SITE_PHASE,
    EVENTS,
    INVITATION_META,
    ROLE,
    RUN_META,
    SITES,
    START,
)
from medflare.federation.settings import CROSS_SITE, ENROL, FINALIZE, META_LIMIT, step_name
from medflare.methods.base import Plan, SiteAlgorithm

# -- the form of a message, whatever its phase -----------------------------------------------------

_DEPTH = 8  # of tables within tables
_LONGEST_NAME = 500  # characters; tensors deep in a network have long names
_REQUEST_LIMIT = 2**18  # bytes of metadata of a request: names of all sites and their rounds


def message_problem(message: Message, site: str) -> str | None:
    """Why a site's reply cannot be used, whatever its phase, in words, or None."""
    try:
        return (
            state_problem(message.states)
            or meta_problem(message.meta)
            or event_problem(message.meta.get(EVENTS.name, []), site)
        )
    except Exception as error:  # a method that only the site has may have put anything into it
        return f"it cannot be read ({type(error).__name__})"


def state_problem(states: object) -> str | None:
    """Which tensor is not dense, detached and in memory, or which name is too long or not
    printable, in words, or None.
    """
    if not isinstance(states, Mapping):
        return f"its states are {type(states).__name__}"
    for entry, state in states.items():
        if not _is_name(entry) or not isinstance(state, Mapping):
            return f"entry {shown(entry)} is not a state ({type(state).__name__})"
        for name, tensor in state.items():
            if not _is_name(name) or not _is_plain_tensor(tensor):
                kind = type(tensor).__name__
                if type(tensor) is Tensor:
                    kind = f"{tensor.layout}, {tensor.device}, grad {tensor.requires_grad}"
                return f"{entry}/{shown(name)} is not a dense, detached tensor in memory ({kind})"
    return None


def _is_plain_tensor(tensor: object) -> bool:
    if type(tensor) is not Tensor:
        return False
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    return dense and not tensor.is_meta and not tensor.requires_grad


def meta_problem(meta: object, limit: int = META_LIMIT) -> str | None:
    """Why metadata are not at most `limit` bytes of plain JSON values with printable text, in
    words, or None.

    Texts of events need not be printable: `core.events` makes them so.
    """
    if not isinstance(meta, dict):
        return f"its metadata are {type(meta).__name__}"
    try:
        _check_plain({name: value for name, value in meta.items() if name != EVENTS.name}, 0)
        size = len(json.dumps(meta))
    except (TypeError, ValueError) as error:
        return f"metadata: {error}"
    return f"{size} bytes of metadata, more than {limit}" if size > limit else None


def _check_plain(value: object, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
        for name in value:
            if not _is_name(name):
                raise ValueError(f"a name is {shown(name)}")
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"text with characters that cannot be printed: {shown(value)}")
    elif isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"a number of {value.bit_length()} bits")
    for item in inner:
        _check_plain(item, depth + 1)


def event_problem(events: Any, site: str) -> str | None:
    """Why the events of a reply cannot be recorded, in words, or None.

    A site may send events only in its own name.
    """
    problem = EVENTS.problem(events)
    if problem:
        return f"events: {problem}"
    for event in events:
        if event.get("site") not in (None, site):
            return f"an event in the name of {shown(event['site'])}"
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isprintable()


def declaration_problem(
    message: Message, declared: Items, required: Iterable[MetaSpec] = ()
) -> str | None:
    """Which item of plain metadata is not declared, missing or of another type, in words, or None.

    Events need no declaration.
    """
    extra = sorted(message.meta.keys() - {item.name for item in (*declared, EVENTS)})
    if extra:
        return f"unexpected item {shown(extra[0])}"
    for item in required:
        if item not in message:
            return f"item {item.name!r} is missing"
    for item in declared:
        if item in message:
            problem = item.problem(message[item])
            if problem:
                return f"{item.name}: {problem}"
    return None


# -- states as declared ---------------------------------------------------------------------------


def violation(message: Message, manifest: Manifest) -> str | None:
    """How the states differ from the manifest in names, shapes or dtypes; None if they match
    exactly.
    """
    problem = name_difference("entry", manifest, message.states)
    if problem is not None:
        return problem
    for entry, spec in manifest.items():
        state = message.states[entry]
        problem = name_difference("tensor", spec.tensors, state)
        if problem is not None:
            return f"{entry}: {problem}"
        for name, (shape, dtype) in spec.tensors.items():
            tensor = state[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                return (
                    f"{entry}/{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                    f"expected {shape} and {dtype}"
                )
    return None


def non_finite(message: Message) -> str | None:
    """The first tensor that holds NaN or infinity, in words, or None."""
    for entry, state in sorted(message.states.items()):
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                continue
            # A finite sum is ten times as fast to check; the sum of finite values may overflow.
            if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return f"{entry}/{name} holds NaN or infinity"
    return None


def negative(message: Message, manifest: Manifest) -> str | None:
    """The first nonnegative tensor with a value below 0, in words, or None.

    The message must match the manifest.
    """
    for entry, spec in manifest.items():
        for name in sorted(spec.nonnegative):
            if (message.states[entry][name] < 0).any():
                return (
                    f"{entry}/{name} holds a value below 0, "
                    "which a variance or a mean square cannot be"
                )
    return None


def tensor_problem(message: Message, manifest: Manifest) -> str | None:
    """Why the states are not as declared or hold impossible values, in words, or None."""
    return violation(message, manifest) or non_finite(message) or negative(message, manifest)


# -- requests at a site ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestValidator:
    """Checks the server's message for one step of a site.

    Every method raises MessageError with the site, the step and the problem.
    """

    site: str
    phase: str
    round: int

    def check_invitation(self, message: Message) -> None:
        """Check an invitation, as far as is possible before the site's task is loaded."""
        self._check_form(message)
        self._check(_request_meta_problem(message, INVITATION_META))
        if len(set(message[SITES])) < len(message[SITES]):
            self._check(f"item {SITES.name!r} has a name twice")
        for name in message[SITES]:
            if not is_site_name(name):  # it is also that of a folder here
                self._check(f"item {SITES.name!r} has a text that is no name of a site")
        role = message[ROLE]
        if (role == "inside") != (self.site in message[SITES]):
            self._check(f"item {SITES.name!r} and the role {role!r} of {self.site} do not agree")

    def check_start(self, message: Message, plan: Plan) -> None:
        """Check that an invitation holds the initial weights if the task names a weights file, and
        no other tensors.
        """
        request = (START,) if plan.task.network.get("weights") else ()
        invitation = Phase(ENROL, request=request, request_meta=INVITATION_META)
        self._check(request_problem(invitation, plan, message))

    def pop_run_items(self, message: Message) -> Message:
        """Remove the items of `RUN_META`, which do not belong to the method, from a message and
        return them.
        """
        self._check_form(message)
        numbers = Message()
        for item in RUN_META:
            if item in message:
                numbers[item] = message.meta.pop(item.name)
        self._check(_request_meta_problem(numbers, RUN_META))
        return numbers

    def check_request(self, message: Message, algorithm: SiteAlgorithm) -> None:
        """Check a message, without the items of `RUN_META`, against its phase's declaration."""
        if self.phase == CROSS_SITE:
            self._check(request_problem(CROSS_SITE_PHASE, algorithm.plan, message))
        elif self.phase != FINALIZE or FINALIZE in algorithm.phases:
            problem = request_problem(algorithm.phase(self.phase), algorithm.plan, message)
            self._check(problem or algorithm.validate_request(message))

    def _check_form(self, message: Message) -> None:
        self._check(state_problem(message.states) or meta_problem(message.meta, _REQUEST_LIMIT))
        if type(self.round) is not int or self.round < 0:
            self._check(f"its round is {shown(self.round)}")

    def _check(self, problem: str | None) -> None:
        if problem is not None:
            step = f"'{self.phase}'"
            if type(self.round) is int:
                step = step_name(self.phase, self.round)
            raise MessageError(
                f"site {self.site} rejects the server's message for {step}: {problem}"
            )


def _request_meta_problem(message: Message, declared: Items) -> str | None:
    required = [item for item in declared if not item.optional]
    return declaration_problem(message, declared, required)


def request_problem(phase: Phase, plan: Plan, message: Message) -> str | None:
    """How a server's message, without the items of `RUN_META`, differs from its phase's
    declaration, in words, or None.
    """
    entries: dict[str, list[TensorSpec]] = {}
    for spec in phase.request:
        if not spec.when(plan):
            continue
        for name, member in spec.members(plan).items():
            entries.setdefault(name, []).append(member)
        required = spec.of is None and not spec.optional
        if required and spec not in message:
            return f"missing entry {shown(spec.name)}"
    for name, state in message.states.items():
        if name not in entries:
            return f"unexpected entry {shown(name)}"
        problem = _entry_problem(name, state, entries[name], plan)
        if problem:
            return problem
    return _request_meta_problem(message, phase.request_meta)


def _entry_problem(
    name: str, state: StateDict, specs: Iterable[TensorSpec], plan: Plan
) -> str | None:
    """Why a state matches none of its specs, in words, or None."""
    part = Message({name: state})
    problem = None
    for spec in specs:
        problem = tensor_problem(part, {name: spec.spec(plan)})
        if problem is None:
            return None
    return problem
