"""Phases: what the server requests and a site replies, declared at the method that handles it.

    class FedAvgSite(SiteAlgorithm[FedAvgHyper]):
        @phase(request=(MODEL,), reply=(MODEL,), meta=MEASURED)
        def train(self, round: int, incoming: Message) -> Message: ...

    class FedAvgServer(ServerAlgorithm[FedAvgServerHyper]):
        @handles(FedAvgSite.train)
        def aggregate_models(self, step: Step, replies: Mapping[str, Message]) -> None: ...

An overridden method keeps its declaration, unless it has one of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.specs import Manifest, MetaSpec, TensorSpec

Handler = TypeVar("Handler", bound=Callable[..., Any])
Tensors = tuple[TensorSpec, ...]
Items = tuple[MetaSpec, ...]
_KINDS = {"request": TensorSpec, "reply": TensorSpec, "meta": MetaSpec, "request_meta": MetaSpec}
# Marks of methods.
_PHASE = "_phase"
_ADDED = "_added"
ASKS = "_asks"
HANDLES = "_handles"


@dataclass(frozen=True)
class Phase:
    """One kind of exchange.

    Attributes:
        name: also the name of the site algorithm's method that replies.
        request, request_meta: tensors and metadata of the server's message.
        reply, meta: tensors and metadata of the site's reply: all that leaves the hospital.
    """

    name: str
    request: Tensors = ()
    reply: Tensors = ()
    meta: Items = ()
    request_meta: Items = ()

    def extended(self, more: "Phase") -> "Phase":
        """This phase with the entries of another one added."""
        return replace(
            self,
            request=self.request + more.request,
            reply=self.reply + more.reply,
            meta=self.meta + more.meta,
        )

    def replied(self, plan: Any) -> dict[str, TensorSpec]:
        """Entry -> spec of the states of a reply with a plan's settings, families by member."""
        entries: dict[str, TensorSpec] = {}
        for spec in self.reply:
            if spec.when(plan):
                entries |= spec.members(plan)
        return entries

    def manifest(self, plan: Any) -> Manifest:
        """Names, shapes and dtypes of everything that a reply holds with a plan's settings."""
        return {entry: spec.spec(plan) for entry, spec in self.replied(plan).items()}

    def undeclared(self, reply: Message, plan: Any) -> str | None:
        """Which state of a reply is missing, or which state or metadata item is not declared; None
        if it is as declared.
        """
        # A declared item may be missing.
        declared = {item.name for item in self.meta} & reply.meta.keys()
        states = self.replied(plan).keys()
        return name_difference("entry", states, reply.states) or name_difference(
            "item", declared, reply.meta
        )


def name_difference(kind: str, expected: Any, names: Any) -> str | None:
    """What is missing and what is unexpected among names, in words, or None."""
    missing = set(expected) - set(names)
    unexpected = set(names) - set(expected)
    parts = []
    if missing:
        parts.append(f"missing {kind} {min(missing)!r}")
    if unexpected:
        parts.append(f"unexpected {kind} {min(unexpected)!r}")
    return " and ".join(parts) or None


# -- at the method that handles it ---------------------------------------------------------------


def phase(
    *, request: Tensors = (), reply: Tensors = (), meta: Items = (), request_meta: Items = ()
) -> Callable[[Handler], Handler]:
    """Declares that a site algorithm's method replies to the phase of its name; see `Phase`."""
    return _marked(_PHASE, Phase("", request, reply, meta, request_meta))


def extends(
    *, request: Tensors = (), reply: Tensors = (), meta: Items = ()
) -> Callable[[Handler], Handler]:
    """Declares what a method adds to the phase that the class inherits or is mixed into."""
    return _marked(_ADDED, Phase("", request, reply, meta))


def asks(*replying: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Declares that a server algorithm's method, (step, site) -> message, makes the requests that
    these methods of a site algorithm reply to.
    """
    return _marked(ASKS, _methods_of_site(replying))


def handles(*replying: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Declares that a server algorithm's method, (step, replies) -> None, processes the replies of
    these methods of a site algorithm.
    """
    return _marked(HANDLES, _methods_of_site(replying))


def _methods_of_site(replying: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, which must be methods; ConfigError if one is not, or if there is none."""
    if not replying:
        raise ConfigError("@asks() or @handles() names no method; write @handles(MySite.train)")
    for method in replying:
        if not callable(method):
            raise ConfigError(f"@asks or @handles of {method!r}: name a method, as MySite.train")
    return replying


def is_declared(method: Callable[..., Any]) -> bool:
    """Whether a method stands below one of these decorators, and is called by its class."""
    return any(hasattr(method, mark) for mark in (_PHASE, _ADDED, ASKS, HANDLES))


def phases_of(method: Callable[..., Any]) -> set[str]:
    """The phases that a server algorithm's method asks for or handles."""
    return {of.__name__ for mark in (ASKS, HANDLES) for of in getattr(method, mark, ())}


def _marked(mark: str, value: Any) -> Callable[[Handler], Handler]:
    """A decorator that sets a mark of the method."""

    def declare(method: Handler) -> Handler:
        if isinstance(value, Phase):
            _check_specs(value, method.__qualname__)
        setattr(method, mark, value)
        return method

    return declare


def _check_specs(phase: Phase, method: str) -> None:
    for argument, kind in _KINDS.items():
        specs = getattr(phase, argument)
        if not isinstance(specs, tuple) or not all(isinstance(spec, kind) for spec in specs):
            raise ConfigError(
                f"the declaration of {method}: write {argument} as a tuple (SPEC,) of "
                f"{kind.__name__} only"
            )


# -- collected by the class ----------------------------------------------------------------------


def declared_phases(algorithm: type) -> dict[str, Phase]:
    """Name -> phase of a site algorithm's class."""
    phases = {}
    for name, method in _methods(algorithm):
        if hasattr(method, _PHASE):
            phases[name] = replace(getattr(method, _PHASE), name=name)
        elif hasattr(method, _ADDED):
            phases[name] = phases.get(name, Phase(name)).extended(getattr(method, _ADDED))
    return phases


def methods_by_phase(algorithm: type, mark: str) -> dict[str, str]:
    """Phase -> name of the method of a server algorithm's class that makes its requests (`ASKS`) or
    processes its replies (`HANDLES`).
    """
    names = {}
    for name, method in _methods(algorithm):
        if getattr(method, "__qualname__", "").startswith("_marked."):
            raise ConfigError(
                f"{algorithm.__name__}.{name}: name what it handles, as @handles(MySite.train)"
            )
        for replying in getattr(method, mark, ()):
            names[replying.__name__] = name
    return names


def _methods(algorithm: type) -> Iterator[tuple[str, Any]]:
    """All methods of a class, those of its base classes first."""
    for base in reversed(algorithm.__mro__):
        yield from vars(base).items()
