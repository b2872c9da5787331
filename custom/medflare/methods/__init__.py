"""Methods: a room for each paper, families of others, and what a method is made of.

What an author of a method needs can be imported from here: `Method`, `SiteAlgorithm`,
`ServerAlgorithm`, FedAvg's algorithms to start from, the words of their declarations, and the
training loop.
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from medflare.core.errors import ConfigError
    from medflare.core.hyper import param
    from medflare.core.message import FinalModels, Message
    from medflare.core.numbers import finite_or_none
    from medflare.core.phases import Phase, asks, extends, handles, phase
    from medflare.core.rng import torch_generator
    from medflare.core.settings import STRICT, strict_dataclass
    from medflare.core.specs import MetaSpec, TensorSpec, count, listing, number, table, text
    from medflare.core.states import StateDict, blend, copy_state, weighted_mean
    from medflare.inference.deployed import build, plain_message
    from medflare.methods.aggregation import (
        Aggregation,
        SiteModel,
        WeightedMean,
        site_models,
        states_of,
    )
    from medflare.methods.base import (
        PersistentState,
        Plan,
        Replies,
        ServerAlgorithm,
        ServerContext,
        ServerHyper,
        SiteAlgorithm,
        SiteHyper,
        Step,
    )
    from medflare.methods.catalogue import build_deployed, get_method, method_names
    from medflare.methods.families.personalized_aggregation.personalized import (
        PersonalizedServer,
        PersonalizedSite,
    )
    from medflare.methods.fedavg.partial import PartialSite
    from medflare.methods.fedavg.personal import PersonalModel, PersonalSite
    from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
    from medflare.methods.fedavg.site import (
        MODEL,
        SELECTED_ROUND,
        FedAvgHyper,
        FedAvgSite,
        FedAvgSiteHyper,
        received,
        trained_model,
    )
    from medflare.methods.method import Method
    from medflare.methods.parts.measured import LOSS, MEASURED, N_SAMPLES, VALIDATION
    from medflare.methods.parts.partial import LocalPart
    from medflare.methods.parts.proximal import proximal_term
    from medflare.methods.parts.selection import Best, ModelSelector
    from medflare.networks.catalogue import feature_width
    from medflare.networks.features import FeatureNetwork, copied_state
    from medflare.privacy.settings import PrivacyHyper
    from medflare.tasks.config import TaskConfig
    from medflare.training.epochs import (
        Loss,
        Steps,
        epochs,
        pack_optimizer,
        run_epochs,
        train_epochs,
        trainable,
    )
    from medflare.training.site import Site

__all__ = [
    "LOSS",
    "MEASURED",
    "MODEL",
    "N_SAMPLES",
    "SELECTED_ROUND",
    "STRICT",
    "VALIDATION",
    "Aggregation",
    "Best",
    "ConfigError",
    "FeatureNetwork",
    "FedAvgHyper",
    "FedAvgServer",
    "FedAvgServerHyper",
    "FedAvgSite",
    "FedAvgSiteHyper",
    "FinalModels",
    "LocalPart",
    "Loss",
    "Message",
    "MetaSpec",
    "Method",
    "ModelSelector",
    "PartialSite",
    "PersistentState",
    "PersonalModel",
    "PersonalSite",
    "PersonalizedServer",
    "PersonalizedSite",
    "Phase",
    "Plan",
    "PrivacyHyper",
    "Replies",
    "ServerAlgorithm",
    "ServerContext",
    "ServerHyper",
    "Site",
    "SiteAlgorithm",
    "SiteHyper",
    "SiteModel",
    "StateDict",
    "Step",
    "Steps",
    "TaskConfig",
    "TensorSpec",
    "WeightedMean",
    "asks",
    "blend",
    "build",
    "build_deployed",
    "copied_state",
    "copy_state",
    "count",
    "epochs",
    "extends",
    "feature_width",
    "finite_or_none",
    "get_method",
    "handles",
    "listing",
    "method_names",
    "number",
    "pack_optimizer",
    "param",
    "phase",
    "plain_message",
    "proximal_term",
    "received",
    "run_epochs",
    "site_models",
    "states_of",
    "strict_dataclass",
    "table",
    "text",
    "torch_generator",
    "train_epochs",
    "trainable",
    "trained_model",
    "weighted_mean",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
