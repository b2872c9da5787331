"""Methods: a room for each paper, families of others, and what a method is made of.

What an author of a method needs can be imported from here: `Method`, `SiteAlgorithm`,
`ServerAlgorithm`, FedAvg's algorithms to start from, the words of their declarations, and the
training loop.
"""

from functools import partial

from medflare.core.facade import public

_MODULES = {
    "aggregation": "Aggregation SiteModel WeightedMean site_models states_of",
    "base": "PersistentState Plan ServerAlgorithm ServerContext ServerHyper "
    "SiteAlgorithm SiteHyper Step",
    "catalogue": "build_deployed get_method method_names",
    "fedavg.partial": "PartialSite",
    "fedavg.server": "FedAvgServer FedAvgServerHyper",
    "fedavg.site": "MODEL SELECTED_ROUND FedAvgHyper FedAvgSite FedAvgSiteHyper "
    "received trained_model",
    "method": "Method",
    "parts.measured": "LOSS MEASURED N_SAMPLES VALIDATION",
    "parts.partial": "LocalPart",
    "fedavg.personal": "PersonalModel",
    "parts.proximal": "proximal_term",
    "parts.selection": "Best ModelSelector",
    "medflare.core.errors": "ConfigError",
    "medflare.core.hyper": "param",
    "medflare.core.message": "Message",
    "medflare.core.phases": "Phase asks extends handles phase",
    "medflare.core.rng": "torch_generator",
    "medflare.core.settings": "STRICT",
    "medflare.core.specs": "MetaSpec TensorSpec count listing number table text",
    "medflare.core.states": "StateDict blend copy_state weighted_mean",
    "medflare.inference.deployed": "build plain_message",
    "medflare.networks.features": "FeatureNetwork",
    "medflare.privacy.settings": "PrivacyHyper",
    "medflare.tasks.config": "TaskConfig",
    "medflare.training.epochs": "Steps epochs finite_or_none pack_optimizer run_epochs "
    "train_epochs trainable",
    "medflare.training.site": "Site",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_PUBLIC)
__getattr__ = partial(public, __name__, _PUBLIC)
