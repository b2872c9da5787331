"""A method as one object: its algorithms, the models it delivers, its paper. Light to import; the algorithms are loaded when needed."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from medflare.core.errors import ConfigError
from medflare.core.hyper import SplitHyper, build_hyper, plain, split_hyper

if TYPE_CHECKING:
    from torch import nn

    from medflare.core.message import Message
    from medflare.methods.base import Plan, ServerAlgorithm, ServerContext, SiteAlgorithm
    from medflare.tasks.config import TaskConfig
    from medflare.training.site import Site

Builder: TypeAlias = "Callable[[TaskConfig, Message], nn.Module]"
MODEL_ROLES: Final = ("global", "personal", "deployed")  # the final models of a site, as results name them


@dataclass(frozen=True)
class Method:
    """Declared as `METHOD` in the package or module of the method, where the catalogue finds it.

    Attributes:
        name: as commands, jobs and results spell it.
        title: what it is, a few words.
        paper: short citation.
        site, server: the two algorithms, each a class or "module:Class".
        models: kind of a delivered model -> builder of its module, or "module:function"; the kind "plain" needs none.
        trains: whether there are rounds of training, and models in the end; a method without asks sites what they have.
        roles: which final models an inside site has, of `MODEL_ROLES`.
        outside: whether a site that never trains gets a model; without, a run with outside sites is refused.
        origin: names of the methods that site algorithm and server algorithm come from, where this is a pair of two methods' algorithms.
    """

    name: str
    title: str
    paper: str
    site: "str | type[SiteAlgorithm[Any]]"
    server: "str | type[ServerAlgorithm[Any]]"
    models: "Mapping[str, str | Builder]" = field(default_factory=dict)
    trains: bool = True
    roles: tuple[str, ...] = MODEL_ROLES
    outside: bool = True
    origin: tuple[str, str] | None = None

    @property
    def algorithms(self) -> tuple[str, str]:
        """Names of the methods that site algorithm and server algorithm come from."""
        return self.origin or (self.name, self.name)

    @cached_property
    def site_class(self) -> "type[SiteAlgorithm[Any]]":
        """The site algorithm, with what the server algorithm asks of any site mixed in."""
        return extended(loaded(self.site), self.server_class.site_extension)

    @cached_property
    def server_class(self) -> "type[ServerAlgorithm[Any]]":
        """The server algorithm."""
        return loaded(self.server)

    # -- hyper-parameters ------------------------------------------------------------------------------------------------------

    @property
    def hyper_classes(self) -> dict[str, type]:
        """algorithm -> class of the hyper-parameters that it owns."""
        return {"site": self.site_class.Hyper, "server": self.server_class.Hyper}

    def check(self, values: Mapping[str, Any], task: "TaskConfig | None" = None) -> None:
        """Every name and value, and whether they go with the task, before anything starts.

        Args:
            values: hyper-parameters, see `core.hyper.split_hyper`.
            task: what is to be learnt; None checks the hyper-parameters alone.

        Raises:
            ConfigError: names the first that is wrong.
        """
        self._check_pair()
        site, server = self._built(values)
        if task is None:
            return
        from medflare.networks.dry_run import check_network
        from medflare.tasks.losses import build_loss
        from medflare.tasks.optimizers import check_optimizer

        check_optimizer(task.optimizer, f"task {task.name}")
        build_loss(task)
        network = check_network(task)
        if self.site_class.needs_features(site) and not network.has_features:
            raise ConfigError(
                f"method {self.name!r} works with features, and network {task.network['name']} of task {task.name} has none: its output "
                "is that of no single layer; take another network, or other arguments of it"
            )
        if task.freeze.parts:
            self._check_freeze(task, network)
        if "accumulate" not in self.site_class.capabilities:
            refuse_other_steps(task, f"method {self.name!r} takes steps of its own")
        self.site_class.check(task, site, server)

    def _check_freeze(self, task: "TaskConfig", network: "nn.Module") -> None:
        """ConfigError where an algorithm does not know of parts at rest, or the network has no such parts."""
        from medflare.methods.parts.partial import LocalPart

        if "freeze" not in self.site_class.capabilities & self.server_class.capabilities:
            raise ConfigError(f"method {self.name!r} trains all of the network from the first round; leave out task.freeze, or run fedavg")
        try:
            shared = LocalPart.of_paths(network, task.freeze.parts).shared(network.state_dict())
        except ValueError as error:
            raise ConfigError(f"task {task.name}: freeze.parts: {error}") from error
        if not shared:
            raise ConfigError(f"task {task.name}: freeze.parts {task.freeze.parts} leave nothing to train; leave one of them out")

    def effective(self, values: Mapping[str, Any]) -> SplitHyper:
        """Every hyper-parameter as it is used, under its algorithm: the given values, checked, and the defaults of the others.

        Args:
            values: hyper-parameters, see `core.hyper.split_hyper`.
        """
        site, server = self._built(values)
        return {"site": plain(site), "server": plain(server)}

    def _built(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        if self.dp_unsupported_reason and (asked := [name for name in _bare_names(values) if name.startswith("dp_")]):
            raise ConfigError(f"{asked[0]}: {self.dp_unsupported_reason}")
        owned = split_hyper(values, self.hyper_classes, self.name)
        built: list[Any] = [
            build_hyper(cls, owned[algorithm], f"method {self.name}, {algorithm} algorithm")
            for algorithm, cls in self.hyper_classes.items()
        ]
        return built[0], built[1]

    def _check_pair(self) -> None:
        """ConfigError where an algorithm needs of the other what only its own method's has."""
        lonely = "method {!r}: the {} half of {!r} goes with no {} algorithm but its own; run {!r}"
        (of_site, of_server), site, server = self.algorithms, self.site_class, self.server_class
        if not issubclass(server.Hyper, site.server_hyper):
            raise ConfigError(lonely.format(self.name, "site", of_site, "server", of_site))
        if not issubclass(site.Hyper, server.site_hyper):
            raise ConfigError(lonely.format(self.name, "server", of_server, "site", of_server))

    @property
    def dp_unsupported_reason(self) -> str:
        """Why sites cannot train with differential privacy, one line; empty where they can."""
        from medflare.privacy.settings import PrivacyHyper

        if issubclass(self.site_class.Hyper, PrivacyHyper):
            return ""
        return f"method {self.name!r} cannot train with differential privacy: {self.site_class.dp_unsupported_reason}"

    # -- objects ---------------------------------------------------------------------------------------------------------------

    def plan(self, task: "TaskConfig", sites: tuple[str, ...], values: Mapping[str, Any]) -> "Plan[Any, Any]":
        """What both algorithms know before anything is trained.

        Args:
            task: what is to be learnt.
            sites: names of the inside sites, sorted.
            values: hyper-parameters, see `core.hyper.split_hyper`.

        Raises:
            ConfigError: as `check`.
        """
        from medflare.methods.base import Plan

        self._check_pair()
        return Plan(task, sites, *self._built(values))

    def make_site(self, site: "Site", plan: "Plan[Any, Any]") -> "SiteAlgorithm[Any]":
        """The site algorithm at one site."""
        return self.site_class(site, plan)

    def make_server(self, context: "ServerContext") -> "ServerAlgorithm[Any]":
        """The server algorithm of one federation."""
        return self.server_class(context)


def refuse_other_steps(task: "TaskConfig", reason: str) -> None:
    """Nothing where a step follows one batch and no loss is scaled, as every training loop can.

    Args:
        task: says how steps are taken.
        reason: why no others can be, the beginning of the message.

    Raises:
        ConfigError: the task asks for others.
    """
    if task.precision == "fp16":
        raise ConfigError(f"{reason}, which the scaled losses of fp16 do not reach; set task.precision 'bf16' or 'fp32'")
    if task.accumulate > 1:
        raise ConfigError(f"{reason}, one for every batch; leave out task.accumulate, or make task.batch_size larger")


def paired(of_site: Method, of_server: Method) -> Method:
    """The site algorithm of one method with the server algorithm of another.

    Raises:
        ConfigError: one of the two trains nothing.
    """
    if of_site is of_server:
        return of_site
    if not (of_site.trains and of_server.trains):
        alone = of_server if of_site.trains else of_site
        raise ConfigError(f"method {alone.name!r} trains nothing, and its algorithms go with no others; run {alone.name!r}")
    return Method(
        name=f"{of_site.name}+{of_server.name}",
        title=f"{of_site.title} with the server algorithm of {of_server.title}",
        paper=f"{of_site.paper}; {of_server.paper}",
        site=of_site.site,
        server=of_server.server,
        models={**of_server.models, **of_site.models},
        roles=of_site.roles,
        outside=of_site.outside and of_server.outside,
        origin=(of_site.algorithms[0], of_server.algorithms[1]),
    )


def loaded(target: Any) -> Any:
    """A class or function, imported where "module:name" names it.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{target!r} cannot be loaded ({error}); a method names its parts as 'module:name'") from error


def _bare_names(values: Mapping[str, Any]) -> list[str]:
    names = [name.rpartition(".")[2] for name in values]
    return names + [name for value in values.values() if isinstance(value, Mapping) for name in value]


def extended(site_class: "type[SiteAlgorithm[Any]]", extension: "type[SiteAlgorithm[Any]] | None") -> "type[SiteAlgorithm[Any]]":
    """The site algorithm with a server algorithm's `site_extension` mixed in; its hyper-parameters stay the site algorithm's own."""
    from medflare.core.manifest import merged_phases

    if extension is None or issubclass(site_class, extension):
        return site_class
    phases = merged_phases(site_class.phases, extension.phases)
    return type(f"{extension.__name__}{site_class.__name__}", (extension, site_class), {"Hyper": site_class.Hyper, "phases": phases})
