"""Extensions: objects of other distributions, by the names of their entry points. Light to import.

    [project.entry-points."medflare.losses"]
    poly = "lab_losses.poly:PolyLoss"

| group | the object |
|---|---|
| methods | a `methods.method.Method` of that name |
| losses | a class or function of its arguments, and of `task` if it has one, that returns a torch |
|   | module: (logits, targets) as of `tasks.losses` -> scalar |
| metrics | a `tasks.metrics_table.Metric` |
| transforms | a class of MONAI: an array `Transform` for `intensity`; for `augment` a |
|   | `MapTransform` that is `Randomizable` and says `spatial = True` if it moves pixels |
| optimizers | a class derived from `torch.optim.Optimizer` that steps without a closure |
| networks | a class or function of `in_channels`, `out_channels`, optionally `spatial_dims` and |
|   | `size`, and its arguments, that returns a torch module |
| adaptations | a function (model, task, message) -> module, images to probabilities |
| rules | a function (site -> state, site -> share, the round's first state or None) -> state |
| readers | its name is a suffix ("npy"); a function (path) -> `data.reading.Stored` |

A task, a job and a model's card are data from other parties. So a name imports code only if this
process trusts its package: with `packages` in the party's local/medflare.json under FLARE (see
`flare.job_policy`), otherwise with the environment variable MEDFLARE_PACKAGES. A method that the
user of this process names needs no trust, see `methods.catalogue`.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from medflare.core.errors import ConfigError, one_line
from medflare.core.packages import entry_module, trust_refusal

PACKAGES_VARIABLE = "MEDFLARE_PACKAGES"  # packages or modules, separated by commas
_trusted: set[str] = set()


def trust(module: str) -> None:
    """Allow this process to import extensions of the module; the party's own settings say so."""
    _trusted.add(module)


def trusted() -> tuple[str, ...]:
    """The packages and modules that this process trusts, sorted."""
    listed = os.environ.get(PACKAGES_VARIABLE, "").split(",")
    named = [word.strip().rstrip(".") for word in listed]
    return tuple(sorted({*_trusted, *filter(None, named)}))


def require_trust(what: str, module: str) -> None:
    """Raise ConfigError, which begins with `what`, if this process does not trust the module."""
    package = module.partition(".")[0]
    reason = trust_refusal(module, trusted())
    if reason:
        raise ConfigError(
            f"{what}: this process does not trust {package}: {reason}, "
            f"or outside FLARE set {PACKAGES_VARIABLE}={package}"
        )


@dataclass
class Extensions:
    """The names of a group, and its objects of other distributions.

    Args:
        kind: what one of them is, for messages: "loss".
        group: "losses"; the entry points are in "medflare.losses".
        builtin: name -> object, or the names, that other distributions may not use.
        check: called with an object when it is loaded; raises if it does not work.
    """

    kind: str
    group: str
    builtin: Callable[[], Collection[str]]
    check: Callable[[Any], None]

    def __iter__(self) -> Iterator[str]:
        """All names, built-in ones first."""
        return iter(dict.fromkeys((*self.builtin(), *self.names())))

    def names(self) -> tuple[str, ...]:
        """Names of other distributions, sorted; imports none."""
        return tuple(sorted(_points(self.group)))

    def module(self, name: str) -> str:
        """The module that holds an object of another distribution, not imported; "" if none."""
        return extension_module(self.group, name)

    def foreign(self, name: str) -> Any:
        """The object of another distribution; None if none has the name.

        Raises:
            ConfigError: the name is in use, the package is not trusted, or the object does not
                work.
        """
        points = _points(self.group).get(name)
        if points is None:
            return None
        require_unused(self.kind, points, self.builtin())
        require_trust(with_distributions(self.kind, points), entry_module(points[0]))
        return _loaded(self.kind, points[0], self.check)


def read_points(group: str) -> dict[str, list[EntryPoint]]:
    """Name -> the entry points of that name, of all distributions, in the group ("losses")."""
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"medflare.{group}"):
        points.setdefault(point.name, []).append(point)
    return points


def require_unused(kind: str, points: Sequence[EntryPoint], builtin: Collection[str]) -> None:
    """Raise ConfigError if these entry points, of one name, differ, or medflare uses the name."""
    if len({point.value for point in points}) > 1 or points[0].name in builtin:
        what = with_distributions(kind, points)
        raise ConfigError(f"{what}: the name is in use; uninstall one, or give another name")


def load(kind: str, point: EntryPoint, check: Callable[[Any], None]) -> Any:
    """The object of an entry point; ConfigError if it cannot be imported, or `check` raises."""
    try:
        candidate = point.load()
        check(candidate)
    except Exception as error:  # whatever the package raises
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(
            f"{with_distributions(kind, [point])} cannot be used ({problem})"
        ) from error
    return candidate


_points = cache(read_points)
_loaded = cache(load)


def with_distributions(kind: str, points: Sequence[EntryPoint]) -> str:
    """Kind, name and distributions of entry points of one name, for messages."""
    owners = [
        f"the distribution {point.dist.name}" if point.dist else point.value for point in points
    ]
    return f"{kind} {points[0].name!r} of {' and '.join(dict.fromkeys(owners))}"


def extension_module(group: str, name: str) -> str:
    """The module of `Extensions.module`, by the name of a group ("losses")."""
    points = _points(group).get(name)
    return entry_module(points[0]) if points else ""


def check_callable(candidate: Any) -> None:
    """Raise TypeError for an object that cannot be called."""
    if not callable(candidate):
        raise TypeError(f"a {type(candidate).__name__} cannot be called")
