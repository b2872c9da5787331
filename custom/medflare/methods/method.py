"""A method as one object: its algorithms, its kinds of final models, its paper. Importing it
imports no torch.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from medflare.core.errors import ConfigError
from medflare.core.hyper import SplitHyper, build_hyper, described, plain, split_hyper
from medflare.core.text import Json

if TYPE_CHECKING:
    from torch import nn

    from medflare.core.message import Message
    from medflare.methods.base import Plan, ServerAlgorithm, ServerContext, SiteAlgorithm
    from medflare.tasks.config import TaskConfig
    from medflare.training.site import Site

Builder: TypeAlias = "Callable[[TaskConfig, Message], nn.Module]"
# The final models of a site, as results name them.
FINAL_MODELS = ("global", "personal", "deployed")


@dataclass(frozen=True)
class Method:
    """A method, declared in the `__init__` of its package, where the catalogue finds it.

    Attributes:
        site, server: the two algorithms, each a class or "module:Class".
        models: kind of a final model -> builder of its module, or "module:function"; the kind
            "plain" needs none.
        trains: False for a method that only queries the sites: no rounds of training, no new
            models.
        roles: final models of an inside site, of `FINAL_MODELS`; () for none.
        outside: whether outside sites get a model; if not, a run with outside sites is refused.
        family: of methods that share their mechanism; "" for a paper's own room.
        stays: what a site keeps for itself from round to round, in a few words; "": nothing.
        origin: names of the methods of the site algorithm and the server algorithm, for a pair of
            two methods.
    """

    name: str
    title: str
    paper: str
    site: "str | type[SiteAlgorithm]"
    server: "str | type[ServerAlgorithm]"
    models: "Mapping[str, str | Builder]" = field(default_factory=dict)
    trains: bool = True
    roles: tuple[str, ...] = FINAL_MODELS
    outside: bool = True
    family: str = ""
    stays: str = ""
    origin: tuple[str, str] | None = None

    @property
    def algorithms(self) -> tuple[str, str]:
        """Names of the methods of the site algorithm and the server algorithm."""
        return self.origin or (self.name, self.name)

    @cached_property
    def site_class(self) -> "type[SiteAlgorithm]":
        """The site algorithm, extended by the server algorithm's `site_extension`."""
        return extended(loaded(self.site), self.server_class.site_extension)

    @cached_property
    def server_class(self) -> "type[ServerAlgorithm]":
        return loaded(self.server)

    def _check_class(self, argument: str, target: Any, kind: type) -> None:
        """Raises ConfigError if the class of an algorithm is not of this kind."""
        cls = loaded(target)
        if not isinstance(cls, type) or not issubclass(cls, kind):
            raise ConfigError(
                f"method {self.name!r}: {argument}={getattr(cls, '__name__', cls)} is no "
                f"{kind.__name__}; name a class derived from it"
            )

    @property
    def hyper_classes(self) -> dict[str, type[Any]]:
        """ "site" and "server" -> class of its hyper-parameters."""
        return {"site": self.site_class.Hyper, "server": self.server_class.Hyper}

    def check(self, values: Json, task: "TaskConfig | None" = None) -> None:
        """Raises ConfigError for invalid hyper-parameters (see `core.hyper.split_hyper`), or a task
        that does not go with them.
        """
        self._check_pair()
        if task is not None:
            self.refuse_settings(values, task)
        site, server = self.built(values)
        if task is None:
            return
        from medflare.networks.dry_run import check_network
        from medflare.tasks.losses import build_loss
        from medflare.tasks.optimizers import check_optimizer

        check_optimizer(task.optimizer, f"task {task.name}")
        build_loss(task)
        network = check_network(task)
        if self.site_class.needs_features(site) and not network.has_features:
            network_name = f"network {task.network['name']} of task {task.name}"
            raise ConfigError(
                f"method {self.name!r} works with features, and {network_name} has none; "
                "choose another network"
            )
        if task.freeze.parts:
            self._check_freeze(task, network)
        if not self.site_class.accumulates:
            self._check_steps(task)
        self.site_class.check(task, site, server)

    def refuse_settings(self, values: Json, task: "TaskConfig") -> None:
        """Raises ConfigError for a setting of the task, or the end of its name, among the
        hyper-parameters.
        """
        known = {name for owner in self.hyper_classes.values() for name in described(owner)}
        settings = []
        for setting, value in task.to_dict().items():
            settings.append(setting)
            if isinstance(value, dict):
                settings += [f"{setting}.{inner}" for inner in value]
        for name in sorted(values.keys() - known):
            for setting in settings:
                if f".{setting}".endswith(f".{name}"):
                    raise ConfigError(
                        f"{name} is not a hyper-parameter of {self.name} but a setting of the "
                        f"task; did you mean task.{setting}?"
                    )

    def _check_freeze(self, task: "TaskConfig", network: "nn.Module") -> None:
        from medflare.methods.parts.partial import LocalPart

        if not (self.site_class.freezes and self.server_class.freezes):
            raise ConfigError(
                f"method {self.name!r} trains all of the network from the first round; "
                "leave out task.freeze: add --set task.freeze=[] --lr 0.0003 "
                "(pretrained weights change slowly), or run fedavg"
            )
        try:
            shared = LocalPart.of_paths(network, task.freeze.parts).shared(network.state_dict())
        except ValueError as error:
            raise ConfigError(f"task {task.name}: freeze.parts: {error}") from error
        if not shared:
            raise ConfigError(
                f"task {task.name}: freeze.parts {task.freeze.parts} leave nothing to train; "
                "leave one of them out"
            )

    def _check_steps(self, task: "TaskConfig") -> None:
        """Raises ConfigError for settings that an algorithm with its own steps does not support."""
        problem = f"method {self.name!r} takes its own steps"
        if task.precision == "fp16":
            raise ConfigError(
                f"{problem}, which do not support the scaled losses of fp16; "
                "set task.precision 'bf16' or 'fp32'"
            )
        if task.accumulate > 1:
            raise ConfigError(
                f"{problem}, one for every batch; "
                "leave out task.accumulate, or make task.batch_size larger"
            )

    def effective(self, values: Json) -> SplitHyper:
        """All hyper-parameters, checked, with the defaults of those not in `values` (see
        `core.hyper.split_hyper`).
        """
        site, server = self.built(values)
        return {"site": plain(site), "server": plain(server)}

    def built(self, values: Json) -> tuple[Any, Any]:
        """The hyper-parameters of the site and of the server algorithm, checked, with defaults."""
        names = [name.rpartition(".")[2] for name in values]
        for value in values.values():
            if isinstance(value, Mapping):
                names += value
        for name in names:
            if name.startswith("dp_") and self.dp_unsupported_reason:
                raise ConfigError(f"{name}: {self.dp_unsupported_reason}")
        split = split_hyper(values, self.hyper_classes, self.name)
        site, server = [
            build_hyper(cls, split[algorithm], f"method {self.name}, {algorithm} algorithm")
            for algorithm, cls in self.hyper_classes.items()
        ]
        return site, server

    def _check_pair(self) -> None:
        """Raises ConfigError if a class is no algorithm, or works only with its method's other
        algorithm.
        """
        from medflare.methods.base import ServerAlgorithm, SiteAlgorithm

        self._check_class("site", self.site, SiteAlgorithm)
        self._check_class("server", self.server, ServerAlgorithm)
        of_site, of_server = self.algorithms
        if not issubclass(self.server_class.Hyper, self.site_class.server_hyper):
            kind, other, name = "site", "server", of_site
        elif not issubclass(self.site_class, self.server_class.site_algorithm):
            kind, other, name = "server", "site", of_server
        else:
            return
        raise ConfigError(
            f"method {self.name!r}: the {kind} algorithm of {name!r} works only with its {other} "
            f"algorithm; run {name!r}"
        )

    @property
    def dp_unsupported_reason(self) -> str:
        """Why sites cannot train with differential privacy, one line; empty if they can."""
        from medflare.privacy.settings import PrivacyHyper

        if issubclass(self.site_class.Hyper, PrivacyHyper):
            return ""
        reason = self.site_class.dp_unsupported_reason
        return f"method {self.name!r} cannot train with differential privacy: {reason}"

    def plan(self, task: "TaskConfig", sites: tuple[str, ...], values: Json) -> "Plan":
        """The plan of the inside sites (sorted names), with hyper-parameters as in `check`, which
        raises the same errors.
        """
        from medflare.methods.base import Plan

        self._check_pair()
        return Plan(task, sites, *self.built(values))

    def role_problem(self, models: Iterable[str]) -> str | None:
        """Which of the final models is none of `roles`, in words, or None."""
        undeclared = [name for name in models if name not in self.roles]
        if not undeclared:
            return None
        declared = ", ".join(self.roles) or "none"
        return f"finalize makes a model {undeclared[0]!r}, its roles are {declared}"

    def make_site(self, site: "Site", plan: "Plan") -> "SiteAlgorithm":
        return self.site_class(site, plan)

    def make_server(self, context: "ServerContext") -> "ServerAlgorithm":
        return self.server_class(context)


def paired(of_site: Method, of_server: Method) -> Method:
    """The site algorithm of one method with the server algorithm of another; ConfigError if one of
    the two does not train.
    """
    if of_site is of_server:
        return of_site
    if not (of_site.trains and of_server.trains):
        alone = of_server if of_site.trains else of_site
        raise ConfigError(
            f"method {alone.name!r} does not train and cannot be paired; run {alone.name!r}"
        )
    return replace(
        of_site,
        name=f"{of_site.name}+{of_server.name}",
        title=f"{of_site.title} with the server algorithm of {of_server.title}",
        paper=f"{of_site.paper}; {of_server.paper}",
        server=of_server.server,
        models={**of_server.models, **of_site.models},
        outside=of_site.outside and of_server.outside,
        family="",
        origin=(of_site.algorithms[0], of_server.algorithms[1]),
    )


def loaded(target: Any) -> Any:
    """A class or function; a text "module:name" is imported, or raises ConfigError."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{target!r} cannot be loaded ({error}); write it as 'module:name'"
        ) from error


def extended(
    site_class: "type[SiteAlgorithm]", extension: "type[SiteAlgorithm] | None"
) -> "type[SiteAlgorithm]":
    """The site algorithm with a server algorithm's `site_extension` mixed in; its hyper-parameters
    stay its own.
    """
    if extension is None or issubclass(site_class, extension):
        return site_class
    name = f"{extension.__name__}{site_class.__name__}"
    return type(name, (extension, site_class), {"Hyper": site_class.Hyper})
