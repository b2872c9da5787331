"""All methods by name, and how a job's choice of halves and hyper-parameters becomes objects."""

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.hyper import build_hyper, check_names
from medflare.core.message import Message
from medflare.methods.base import Plan, ServerContext, ServerHalf, SiteHalf, extended
from medflare.privacy.settings import PREFIX, PrivacyHyper, is_private
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig


@dataclass(frozen=True)
class Method:
    """A pairing of halves. Modules are imported when a half is first needed, so that a site loads only its own method.

    Attributes:
        site_half, server_half: "module:Class" below `medflare.methods`.
        paper: short citation.
    """

    name: str
    site_half: str
    server_half: str
    paper: str

    @cached_property
    def site_class(self) -> type[SiteHalf]:
        return extended(_load(self.site_half), self.server_class.site_extension)

    @cached_property
    def server_class(self) -> type[ServerHalf]:
        return _load(self.server_half)

    def check(self, hyper: Mapping[str, Any], task: TaskConfig | None = None) -> None:
        """Every name and value, and whether they go with the task, before anything starts; ConfigError names the first that is wrong."""
        if any(name.startswith(PREFIX) for name in hyper) and self.unprotected:
            raise ConfigError(self.unprotected)
        check_names(hyper, (self.site_class.Hyper, self.server_class.Hyper), self.name)
        of_site: Any = build_hyper(self.site_class.Hyper, hyper)
        build_hyper(self.server_class.Hyper, hyper)
        if task is not None:
            self.site_class.check(task, of_site)

    @property
    def unprotected(self) -> str:
        """Why sites cannot train with differential privacy, one line; empty where they can."""
        if issubclass(self.site_class.Hyper, PrivacyHyper):
            return ""
        return f"method {self.name!r} cannot train with differential privacy: {self.site_class.unprotected}"

    def private(self, hyper: Mapping[str, Any]) -> bool:
        """Whether sites train with differential privacy."""
        return is_private(build_hyper(self.site_class.Hyper, hyper))

    def make_site(self, site: Site, hyper: Mapping[str, Any], sites: tuple[str, ...]) -> SiteHalf:
        return self.site_class(site, build_hyper(self.site_class.Hyper, hyper), sites)

    def make_server(self, context: ServerContext, hyper: Mapping[str, Any]) -> ServerHalf:
        return self.server_class(context, build_hyper(self.server_class.Hyper, hyper))

    def plan(self, task: TaskConfig, sites: tuple[str, ...], hyper: Mapping[str, Any]) -> Plan:
        return Plan(task, sites, build_hyper(self.site_class.Hyper, hyper))


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"medflare.methods.{module}"), name)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("fedavg", "fedavg:FedAvgSite", "fedavg:FedAvgServer", "McMahan et al., AISTATS 2017"),
        Method("fedsm", "fedsm.halves:FedSMSite", "fedsm.halves:FedSMServer", "Xu et al., FedSM, CVPR 2022"),
        Method("fedsm_extra", "fedsm.extra:FedSMExtraSite", "fedsm.extra:FedSMExtraServer", "Xu et al., FedSM, CVPR 2022, Sec. 3.1"),
        Method("feddag", "feddag.halves:FedDAGSite", "feddag.halves:FedDAGServer", "Che et al., FedDAG, arXiv 2501.13967"),
        Method("sha", "fedavg:FedAvgSite", "feddag.sha:SHAServer", "Che et al., FedDAG, arXiv 2501.13967, Sec. III-C"),
        Method("iop_fl", "iop_fl.halves:IOPSite", "iop_fl.halves:IOPServer", "Jiang et al., IOP-FL, IEEE TMI 2023"),
        Method("grace", "grace.halves:GraceSite", "grace.halves:GraceServer", "Zhang et al., GRACE, MICCAI 2023"),
        Method("moon", "baselines.moon:MoonSite", "baselines.moon:MoonServer", "Li et al., MOON, CVPR 2021"),
        Method("robust", "fedavg:FedAvgSite", "baselines.robust:RobustServer", "Yin et al., ICML 2018"),
        Method("prr", "prr.halves:PRRSite", "prr.halves:PRRServer", "Chen et al., PRR-Imbalance, IEEE TMI 2022"),
    )
}

# kind of a delivered model -> "module:function" that builds its module; "plain" is built by medflare.inference.deployed
BUILDERS: dict[str, str] = {
    "dsbn": "grace.adaptation:dsbn_model",
    "ensemble": "iop_fl.outside:ensemble_model",
    "routed": "iop_fl.outside:routed_model",
    "super": "fedsm.super_model:super_model",
    "super_extra": "fedsm.extra:extra_super_model",
    "tent": "grace.adaptation:tent_model",
}


def get_method(name: str, *, site: str | None = None, server: str | None = None) -> Method:
    """A method by name; `site` and `server` swap in the half of another method (GRACE's server on a MOON site, say).

    Raises:
        ConfigError: no such method, with the nearest name.
    """
    chosen, of_site, of_server = (_known(part or name) for part in (name, site, server))
    if of_site is chosen and of_server is chosen:
        return chosen
    return Method(f"{of_site.name}+{of_server.name}", of_site.site_half, of_server.server_half, f"{of_site.paper}; {of_server.paper}")


def _known(name: str) -> Method:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(METHODS))}"
        raise ConfigError(f"no method {name!r}; {hint}")
    return METHODS[name]


def build_deployed(task: TaskConfig, message: Message) -> nn.Module:
    """The module (images -> probabilities) of a delivered model of any kind."""
    from medflare.inference.deployed import plain_model

    kind = message.facts.get("kind", "plain")
    if kind == "plain":
        return plain_model(task, message)
    if kind not in BUILDERS:
        raise ConfigError(f"no builder for a model of kind {kind!r}; known kinds: plain, {', '.join(sorted(BUILDERS))}")
    return _load(BUILDERS[kind])(task, message)
