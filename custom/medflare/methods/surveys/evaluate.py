"""A method that trains nothing: every site tests a final model of any kind, which the server sends,
on its own images.
"""

import logging
from typing import Any

from medflare.core.errors import StateError
from medflare.core.message import FinalModels
from medflare.data.acquisition import TRAINED_ON
from medflare.inference.deployed import WEIGHTS_FILE, load_model
from medflare.methods import (
    ConfigError,
    Message,
    ServerAlgorithm,
    ServerContext,
    SiteAlgorithm,
    SiteHyper,
    Step,
    build,
    param,
    strict_dataclass,
)
from medflare.networks.weights import find_weights

_log = logging.getLogger(__name__)


@strict_dataclass
class EvaluateHyper:
    """Which model is evaluated."""

    file: str = param(
        WEIGHTS_FILE, "weights of the model, beside its card in the server's folder of weights"
    )
    sha256: str = param("", "SHA-256 of the weights")


class EvaluateSite(SiteAlgorithm[SiteHyper]):
    """Tests the server's model; a site sends metrics only."""

    server_hyper = EvaluateHyper
    dp_unsupported_reason = "it trains nothing"
    uses_training = False
    accumulates = True  # a task may set what only training needs
    freezes = True

    def finalize(self, incoming: Message) -> FinalModels:
        """The server's model, checked.

        Raises:
            ConfigError: a kind of model that no method of medflare builds; no other package is
                asked, since the server names the kind.
            StateError: weights that do not fit the task.
        """
        from medflare.methods.catalogue import builtin_builder

        build(self.site.task, incoming, builtin_builder)
        return {"global": incoming, "deployed": incoming}


class EvaluateServer(ServerAlgorithm):
    """Sends the model to every site.

    Raises:
        ConfigError: there is no such model, or it has another SHA-256.
    """

    Hyper = EvaluateHyper
    freezes = True

    def __init__(self, context: ServerContext):
        super().__init__(context)
        path = find_weights(self.hyper.file, context.weights)
        name = path.name
        try:
            self._model = load_model(path.parent)
        except StateError as error:
            _log.warning("%s", error)  # it names folders of the server, which the lead does not see
            raise ConfigError(
                f"weights {name}: no model with its card, or a damaged one"
            ) from error
        digest = self._model.card["sha256"]
        if digest != self.hyper.sha256:
            raise ConfigError(
                f"weights {name}: is another model than the run's (sha256 {digest[:16]}..., "
                f"not {self.hyper.sha256[:16]}...)"
            )

    def steps(self) -> list[Step]:
        return []

    def configure_final(self, site: str) -> Message:
        """The model, whose tensors are shared by all sites' messages."""
        message = self._model.message
        meta = dict(message.meta)
        if TRAINED_ON in self._model.card:
            meta[TRAINED_ON] = self._model.card[TRAINED_ON]
        return Message(message.states, meta)

    def tables(self) -> dict[str, dict[str, dict[str, Any]]]:
        card = self._model.card
        origin = {
            "method": card.get("method"),
            "kind": self._model.kind,
            "site": card.get("site") or "all",
            "seed": card.get("seed"),
            "sha256": card["sha256"][:16],
        }
        return {"Evaluated model": {str(card.get("role")): origin}}
