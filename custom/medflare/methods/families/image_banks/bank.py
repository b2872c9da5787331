"""What the methods of this package share: a survey of the training images, and the bank of its
replies.

The survey is one step before the first round. A site that joins later gets the bank with its first
request and has no entry in it. Neither has a site that sends zeros (`minimum_patients`). All sites,
outside ones too, receive the bank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from medflare.core.message import FinalModels
from medflare.core.rng import numpy_random_state
from medflare.inference.deployed import network_with
from medflare.methods import (
    MODEL,
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    FedAvgSiteHyper,
    Loss,
    Message,
    Plan,
    Replies,
    Site,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
    handles,
    phase,
    strict_dataclass,
    torch_generator,
)
from medflare.methods.aggregation import plain_mean
from medflare.networks.features import Probabilities
from medflare.training.batches import rows_of_patients

_NUMBERS = "numbers"  # of the change, in a final model


@strict_dataclass
class BankHyper(FedAvgSiteHyper):
    """What the server reads of a site algorithm's hyper-parameters.

    Attributes:
        kind: of the final models, see `Prepared`.
        sends_mean: whether sites get the mean of the bank alone.
    """

    kind: ClassVar[str] = "plain"
    sends_mean: ClassVar[bool] = False


@strict_dataclass
class BankServerHyper(FedAvgServerHyper):
    """Only a server with a bank has it."""


def _members(plan: Plan) -> tuple[str, ...]:
    return ("mean",) if plan.site_hyper.sends_mean else plan.sites


B = TypeVar("B", bound=BankHyper)
SURVEY = TensorSpec("survey", measured="train")  # a subclass has its purpose and shapes
BANK = TensorSpec("bank", of=_members)


def mean_entry(bank: Mapping[str, StateDict]) -> StateDict:
    """The mean of a bank's entries, all at equal weights; empty without any."""
    return plain_mean(bank) if bank else {}


class BankSite(FedAvgSite[B]):
    """Describes its training images once (`described`); its loss uses the bank.

    Attributes:
        entry: declaration of the description.
        bank: site -> its entry, of the message at hand.
    """

    server_hyper = BankServerHyper
    freezes = False
    dp_unsupported_reason = "the survey of its training images has no noise"
    entry: ClassVar[TensorSpec] = SURVEY
    bank: dict[str, StateDict]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bank = replace(BANK, template=cls.entry.template)
        cls.phases["survey"] = replace(cls.phases["survey"], reply=(cls.entry,))
        for name in ("train", "validate", "finalize"):
            declared = cls.phases[name]
            cls.phases[name] = replace(declared, request=(*declared.request, bank))

    def __init__(self, site: Site, plan: Plan[B, Any]):
        super().__init__(site, plan)
        self.bank = {}

    def perform(self, phase: str, round: int, incoming: Message) -> Message:
        self.bank = incoming.family(BANK)
        return super().perform(phase, round, incoming)

    @phase(reply=(SURVEY,))
    def survey(self, round: int, incoming: Message) -> Message:
        """The description of the training images."""
        return Message.of({SURVEY: self.described()})

    def described(self) -> StateDict:
        """The state of `entry`, on the CPU."""
        raise NotImplementedError

    def group_means(self, count: int, describe: Callable[[Tensor], Tensor]) -> Tensor:
        """`count` means, (count, ...) on the CPU, of what `describe` makes of images (n, C, ...).

        Each mean is of one random image or, with `minimum_patients`, of a group of as many
        patients.

        Args:
            describe: images (n, C, ...) -> values (n, ...).
        """
        rows = rows_of_patients(self.site.data.train.patients)
        if self.minimum_patients > 1:
            # Numbers of the job's seed would differ from job to job.
            random = numpy_random_state(0, self.site.name, "survey")

            def mean_of(patient: str) -> Tensor:
                values = []
                for index in torch.tensor(rows[patient]).split(self.site.batch_size):
                    values.append(describe(self.site.take("train", index, random).images).cpu())
                return torch.cat(values).mean(dim=0)

            groups = disjoint_groups(sorted(rows), self.minimum_patients)[:count]
            means = [torch.stack(list(map(mean_of, group))).mean(dim=0) for group in groups]
            return torch.stack([means[index % len(means)] for index in range(count)])
        random = numpy_random_state(self.site.seed, self.site.name, "survey")
        values = []
        for _ in range(count):
            (patient,) = random.choice(list(rows), 1, replace=False)
            drawn = torch.tensor([random.choice(rows[patient])])
            image = self.site.take("train", drawn, random).images
            values.append(describe(image).mean(dim=0).cpu())
        return torch.stack(values)

    def round_loss(self, model: FeatureNetwork, round: int) -> Loss:
        """See `batch_loss`."""
        random = torch_generator(self.site.seed, self.site.name, round, "bank")
        return partial(self.batch_loss, random=random)

    def batch_loss(
        self, network: nn.Module, images: Tensor, targets: Tensor, random: torch.Generator
    ) -> Tensor:
        """The loss of a training batch; draws are from `random`, on the CPU."""
        raise NotImplementedError


def disjoint_groups(patients: Sequence[str], size: int) -> list[Sequence[str]]:
    """Groups of `size` patients in their order; a smaller rest joins the last group.

    Examples:
        >>> disjoint_groups("abcde", 2)
        ['ab', 'cde']
        >>> disjoint_groups("a", 2)
        ['a']
    """
    last = max(len(patients) // size - 1, 0) * size
    groups = [patients[start : start + size] for start in range(0, last, size)]
    return [*groups, patients[last:]]


class BankServer(FedAvgServer[BankServerHyper]):
    """FedAvg's server algorithm with a survey first; it sends the bank with every model."""

    site_algorithm = BankSite
    freezes = False

    def steps(self) -> list[Step]:
        return [Step.of(BankSite.survey, 0, everyone=True), *super().steps()]

    @handles(BankSite.survey)
    def collect(self, step: Step, replies: Replies) -> None:
        """Store the entries; zeros are no entry."""
        for site, reply in replies.items():
            entry = reply[SURVEY]
            if any(tensor.any() for tensor in entry.values()):
                self.memory[BANK.member(site)] = entry
                continue
            text = "has no entry in the bank: fewer patients than its minimum_patients"
            self.context.warn(text, site=site, round=step.round)

    def with_bank(self, message: Message) -> Message:
        """The message with the entries that sites get."""
        bank = self.memory.family(BANK)
        if bank and self.context.plan.site_hyper.sends_mean:
            bank = {"mean": mean_entry(bank)}
        for member, entry in bank.items():
            message[BANK.member(member)] = entry
        return message

    def request_of_model(self, step: Step, site: str) -> Message:
        return self.with_bank(super().request_of_model(step, site))

    def configure_final(self, site: str) -> Message:
        return self.with_bank(super().configure_final(site))

    def models(self) -> FinalModels:
        """The global model, as outside sites have it."""
        kind = self.context.plan.site_hyper.kind
        mean = mean_entry(self.memory.family(BANK))
        models = super().models().items()
        return {name: prepared_message(model, kind, mean) for name, model in models}


# -- a change of the images before the network, in deployed models too ----------------------------


class Prepared(nn.Module):
    """A network behind a fixed change of its images.

    Args:
        change: (images, **numbers) -> images.
        numbers: tensors of the change.
    """

    def __init__(self, change: Callable[..., Tensor], numbers: StateDict, network: nn.Module):
        super().__init__()
        self.change = change
        self.network = network
        for name, tensor in numbers.items():
            self.register_buffer(name, tensor)

    def forward(self, images: Tensor) -> Tensor:
        numbers = dict(self.named_buffers(recurse=False))
        return self.network(self.change(images, **numbers))


def prepared_message(model: Message, kind: str, numbers: StateDict) -> Message:
    """A final model of a kind with a change; the model itself if it is plain or has no numbers."""
    if kind == "plain" or not numbers:
        return model
    return Message({**model.states, _NUMBERS: numbers}, {**model.meta, "kind": kind})


def prepared_model(task: TaskConfig, message: Message, change: Callable[..., Tensor]) -> nn.Module:
    """The module of a message of `prepared_message`."""
    prepared = Prepared(change, message.states[_NUMBERS], network_with(task, message[MODEL]))
    return Probabilities(prepared, task).eval()


class PreparedSite(BankSite[B]):
    """Its networks get changed images also in validation and use.

    Attributes:
        change: see `Prepared`.
    """

    change: ClassVar[Callable[..., Tensor]]

    def numbers(self) -> StateDict:
        """The tensors of the change at this site, on the CPU; empty for no change."""
        return mean_entry(self.bank)

    def prepared(self, network: nn.Module) -> nn.Module:
        """The network behind the change."""
        numbers = self.numbers()
        return Prepared(self.change, numbers, network).to(self.site.device) if numbers else network

    def validation(self, model: nn.Module, metric: str | None = None) -> float | None:
        return super().validation(self.prepared(model), metric)

    def finalize(self, incoming: Message) -> FinalModels:
        """The selected global model with the site's change, in all roles."""
        self.bank = incoming.family(BANK)
        numbers = self.numbers()
        models = super().finalize(incoming).items()
        return {role: prepared_message(model, self.hyper.kind, numbers) for role, model in models}
