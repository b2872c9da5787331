"""A method that trains nothing: two algorithms with hyper-parameters, one name of which both have."""

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.method import Method


@dataclass(frozen=True, config=STRICT)
class SiteHyper:
    beta: float = param(0.5, "weight of the prior", symbol="β", source="Eq. 3", low=0)
    rounds: int = param(2, "rounds of annealing at a site", low=1, high=9)
    lam: float | None = param(None, "weight of the other loss", symbol="λ")


@dataclass(frozen=True, config=STRICT)
class ServerHyper:
    beta: float = param(0.9, "momentum of the server", high=1)
    selection: Literal["best", "last"] = param("best", "the round to deliver")
    warm: bool = param(True, "start from the last model")


@dataclass(frozen=True, config=STRICT)
class Nothing:
    pass


class Site:
    Hyper: ClassVar[type] = SiteHyper
    phases: ClassVar[dict[str, object]] = {}
    dp_unsupported_reason = "it trains nothing"


class Server:
    Hyper: ClassVar[type] = ServerHyper
    site_extension = None


class Bare:
    Hyper: ClassVar[type] = Nothing
    site_extension = None


PAIR = Method("pair", "Two Algorithms", "Nobody, Nowhere 2000", Site, Server)  # type: ignore[arg-type]
EMPTY = Method("empty", "Nothing to set", "Nobody, Nowhere 2002", Bare, Bare)  # type: ignore[arg-type]
BARE = Method("bare", "Half a Method", "Nobody, Nowhere 2001", Site, Bare)  # type: ignore[arg-type]
