"""Fine-tuning: after the last round, every site trains the selected global model on its images."""

from typing import TypeVar

from medflare.core.hyper import param
from medflare.core.message import FinalModels, Message
from medflare.core.phases import phase
from medflare.core.settings import strict_dataclass
from medflare.methods.fedavg.personal import PersonalSite
from medflare.methods.fedavg.site import MODEL, SELECTED_ROUND, FedAvgSiteHyper, final_models
from medflare.methods.parts.measured import MEASURED
from medflare.networks.features import copied_state
from medflare.training.epochs import train_epochs


@strict_dataclass
class FineTuningHyper(FedAvgSiteHyper):
    """The epochs after the last round."""

    tuning_epochs: int = param(5, "epochs of fine-tuning after the last round", low=0)


F = TypeVar("F", bound=FineTuningHyper)


class FineTunedSite(PersonalSite[F]):
    """FedAvg's site algorithm; at the end it fine-tunes the global model, and the site uses the one
    with the better validation metric.
    """

    Hyper = FineTuningHyper
    dp_unsupported_reason = (
        "the fine-tuned model learns without noise, and its validation metric leaves the site"
    )

    @phase(request=(MODEL,), request_meta=(SELECTED_ROUND,), meta=MEASURED)
    def fine_tune(self, round: int, incoming: Message) -> Message:
        """Trains the selected global model for `tuning_epochs` with a fresh optimizer."""
        model = self.network("model", incoming[MODEL])
        rounds_trained = incoming[SELECTED_ROUND] or round
        self.selection.add(self.validation(model), rounds_trained, incoming[MODEL])
        optimizer = self.site.optimizer(model.parameters())
        count = self.hyper.tuning_epochs
        loss = train_epochs(model, optimizer, self.site, round, "fine_tune", count=count)
        tuned = copied_state(model)
        reply = self.reply(loss=loss if count else None)
        self.selection.add_trained(rounds_trained, tuned, reply)
        return reply

    def finalize(self, incoming: Message) -> FinalModels:
        """The fine-tuned model inside; the global model outside, or if there is no fine-tuned
        one.
        """
        return final_models(incoming, self.selection.best())
