"""Methods: a room for each paper, the baselines, and what a method is made of.

What an author of a method needs can be imported from here: `Method`, `SiteAlgorithm`, `ServerAlgorithm`, FedAvg's algorithms to
start from, the words of their declarations, and the training loop.
"""

from functools import partial

from medflare.core.facade import public

_MODULES = {
    "aggregation": "Aggregation SiteModel WeightedMean site_models states_of",
    "base": "LOSS MEASURED N_SAMPLES VALIDATION PersistentState Plan ServerAlgorithm ServerContext ServerHyper "
    "SiteAlgorithm SiteHyper Step",
    "catalogue": "build_deployed get_method method_names",
    "fedavg.partial": "PartialSite",
    "fedavg.server": "FedAvgServer FedAvgServerHyper",
    "fedavg.site": "GLOBAL MODEL SELECTED_ROUND TRAIN VALIDATE FedAvgHyper FedAvgSite FedAvgSiteHyper received trained_model",
    "method": "Method",
    "parts.partial": "LocalPart",
    "parts.proximal": "proximal_term",
    "parts.selection": "Best ModelSelector",
    "medflare.training.epochs": "Steps epochs finite_or_none run_epochs train_epochs trainable",
    "medflare.core.hyper": "param",
    "medflare.core.manifest": "TensorSpec MetaSpec Phase count listing number table text",
    "medflare.core.message": "Message",
    "medflare.core.settings": "STRICT",
    "medflare.core.states": "StateDict blend copy_state weighted_mean",
    "medflare.privacy.settings": "PrivacyHyper",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_PUBLIC)
__getattr__ = partial(public, __name__, _PUBLIC)
