"""IOP-FL at an outside site: test-time routing over all personal models and the global one
(Sec. III-C, Algorithm 1).

The coefficients of every layer (`routing`) are fitted to the site's unlabelled images by
consistency under noise, shape and certainty (Eq. 7-10), from the uniform mixture. Where personal
models contradict each other a mixture means nothing: then the fit starts from the mixture or the
personal model that noise changes least, relative to what it tells, normalised by the test batch or
by its own running statistics. The state with the lowest loss among those that pass the gate is
used. The gate exists because an empty mask has the lowest loss: a state must be nearly as
informative as its start, agree with the mixture or with an expert, and empty at most a hundredth of
the masks.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.core.errors import StateError
from medflare.core.hyper import build_hyper
from medflare.core.rng import seeded
from medflare.inference.deployed import Repeated, network_with
from medflare.methods import (
    MODEL,
    Message,
    SiteHyper,
    TaskConfig,
    TensorSpec,
    param,
    strict_dataclass,
    torch_generator,
)
from medflare.methods.iop_fl import formulas
from medflare.methods.iop_fl.routing import RoutedNetwork, Routing, Statistics
from medflare.tasks.metrics import foreground

EXPERTS = TensorSpec("expert", of=lambda plan: plan.sites)  # the sites' personal models
ROUTER = TensorSpec("router")  # the fitted coefficients of a final model

# Least mutual information of a state, as a fraction of the start's.
GATE_INFORMATION = 0.8
# Least agreement (Dice) with the mixture or an expert.
GATE_AGREEMENT = 0.9
# Largest fraction of the images with a mask at the start that a state may leave without one.
GATE_EMPTIED = 0.01
# Two experts contradict each other if their masks agree less (Dice): more differs than coincides.
CONTRADICTION = 0.5
MIXTURE = "mixture"
_MEASURABLE = 1e-6  # nats; less mutual information is rounding


@strict_dataclass
class OutsideHyper(SiteHyper):
    """Test-time routing at a site that never trained."""

    routing: Literal["layer", "global"] = param(
        "layer",
        "coefficients for every layer, or one set for the network",
        symbol="R",
        source="Table III",
    )
    bn_statistics: Statistics = param(
        "batch", "normalise by the test batch, or as in training", source="Sec. III-C"
    )
    route_epochs: int = param(10, "passes over the test images", source="Sec. III-D", low=0)
    route_lr: float = param(1e-3, "Adam rate of the routers", source="Sec. III-D", low=0)
    beta: float = param(
        0.01, "weight of shape and entropy beside consistency", symbol="β", source="Eq. 10", low=0
    )
    radius: Annotated[int, Field(ge=0)] | Literal["auto"] = param(
        "auto",
        "the shape term's neighbourhood radius in pixels; "
        "auto: 10 / 384 of the image's shortest side",
        symbol="d",
        source="Eq. 8",
    )
    noise: float = param(
        0.5,
        "noise added to images, in each image's own standard deviation",
        symbol="ε",
        source="Eq. 7",
        low=0,
    )
    use_consistency: bool = param(
        True, "the consistency term", symbol="L_cons", source="Eq. 7, Fig. 8"
    )
    use_shape: bool = param(
        True, "the shape term (segmentation only)", symbol="L_s", source="Eq. 9, Fig. 8"
    )
    use_entropy: bool = param(True, "the entropy term", symbol="L_e", source="Eq. 9, Fig. 8")
    objective: Literal["information", "paper"] = param(
        "information",
        "protected from collapse: mutual information for entropy, softmax coefficients, a gate; "
        "or Eq. 6 and 10 as printed",
        source="Eq. 6, 10",
    )
    comparisons: bool = param(
        False,
        "also deploy each single model, their ensemble, Tent on the global model, "
        "and routing by the printed objective",
        source="Table II",
    )


@dataclasses.dataclass(frozen=True)
class StateSummary:
    """A state of the routers, described by its predictions for all images.

    Attributes:
        loss: the test-time loss.
        information: mutual information of pixel and prediction, in nats, >= 0.
        agreement: with the masks, or classes, of the reference that it agrees with most; see
            `formulas.agreeing`.
        consistency: what noise changes, Eq. 7.
        has_mask: for each image, whether its mask is not empty; () without masks.
    """

    loss: float
    information: float
    agreement: float
    consistency: float = 0.0
    has_mask: tuple[bool, ...] = ()

    @property
    def instability(self) -> float:
        """The consistency term by the information; infinite without information. Neither empty
        masks nor 0.5 everywhere change under noise, and they tell nothing.

        Examples:
            >>> StateSummary(0.0, 0.08, 1.0, 0.002).instability
            0.025
        """
        if self.information <= _MEASURABLE:
            return math.inf
        return self.consistency / self.information


Decisions = Iterable[Tensor]  # of a state, batch by batch: masks or classes


class PackedDecisions:
    """Stored decisions; masks have one bit a pixel, since those of all experts stay in memory."""

    def __init__(self) -> None:
        self._batches: list[Tensor | tuple[np.ndarray, torch.Size]] = []

    def append(self, decisions: Tensor) -> None:
        """Add the decisions of one more batch."""
        if decisions.dtype == torch.bool:
            self._batches.append((np.packbits(decisions.numpy()), decisions.shape))
        else:
            self._batches.append(decisions)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            if isinstance(batch, Tensor):
                yield batch
            else:
                packed, shape = batch
                bits = np.unpackbits(packed, count=shape.numel())
                yield torch.from_numpy(bits).bool().view(shape)


def summarize_state(
    task: TaskConfig,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    references: Sequence[Decisions] = (),
) -> StateSummary:
    """The summary of all batches together.

    Args:
        batches: (loss, consistency term, probabilities) each.
        references: decisions for the same batches; the agreement is 1 without any.
    """
    count = 0
    sums = torch.zeros(3, dtype=torch.float64)  # loss, consistency and entropy, times the images
    shares: Tensor | float = 0.0
    decisions = PackedDecisions()
    for loss, consistency, p in batches:
        # A difference of entropies needs the precision.
        classes = formulas.all_classes(p, task.target).double()
        count += len(p)
        terms = [loss.double(), consistency.double(), formulas.entropy_loss(classes)]
        sums += len(p) * torch.stack(terms).cpu()
        shares = shares + len(p) * formulas.class_shares(classes).cpu()
        decisions.append(_decisions(p, task))
    mean_loss, mean_consistency, entropy = (sums / count).tolist()
    # I = H(mean p) - mean H(p)
    information = float(formulas.entropy_of(torch.as_tensor(shares / count))) - entropy
    agreements = [agreement(decisions, reference) for reference in references]
    agreement_with_nearest = max(agreements, default=1.0)
    has_mask: list[bool] = []
    if task.kind == "segmentation":
        for masks in decisions:
            has_mask += masks.flatten(1).any(dim=1).tolist()
    return StateSummary(
        mean_loss, max(0.0, information), agreement_with_nearest, mean_consistency, tuple(has_mask)
    )


def agreement(first: Decisions, second: Decisions) -> float:
    """Dice of the masks, or accuracy of the classes, of all batches together; 1 for masks that are
    all empty.
    """
    equal = 0
    total = 0
    for one, other in zip(first, second, strict=True):
        equal_here, total_here = formulas.agreeing(one, other)
        equal += equal_here
        total += total_here
    return equal / total if total else 1.0


def _decisions(p: Tensor, task: TaskConfig) -> Tensor:
    """Masks (bool) of a segmentation, else classes, or 0 and 1 for each label of a multilabel task,
    on the CPU.
    """
    if task.kind == "segmentation":
        return foreground(p, task).cpu()
    if task.target == "multiclass":
        return p.argmax(dim=1).cpu()
    return (p > 0.5).long().cpu()


def gate_refusal(state: StateSummary, start: StateSummary) -> str:
    """Why a state may not be used; "" if it may.

    Examples:
        >>> start = StateSummary(loss=0.04, information=0.08, agreement=1.0)
        >>> gate_refusal(StateSummary(0.03, 0.07, 0.95), start)
        ''
        >>> gate_refusal(StateSummary(0.01, 0.0, 0.95), start)
        'its mutual information is 0.00 of the start, below 0.8'
    """
    least = GATE_INFORMATION * start.information
    if start.information > _MEASURABLE and state.information < least:
        fraction = state.information / start.information
        return f"its mutual information is {fraction:.2f} of the start, below {GATE_INFORMATION:g}"
    if state.agreement < GATE_AGREEMENT:
        return (
            "its agreement with the mixture and with each expert is at most "
            f"{state.agreement:.2f}, below {GATE_AGREEMENT:g}"
        )
    emptied = 0
    for before, after in zip(start.has_mask, state.has_mask, strict=True):
        emptied += before and not after
    if emptied > GATE_EMPTIED * sum(start.has_mask):
        # Without their number: the reason leaves the site, and they may be of one patient.
        return (
            f"it leaves more than {GATE_EMPTIED:.0%} of the images without a mask that have one "
            "at the start"
        )
    return ""


class Start(NamedTuple):
    """Where the fit of the coefficients starts: the mixture or an expert.

    Attributes:
        running: normalise by its running statistics, not by the test batch.
    """

    expert: str
    running: bool = False


def contradict(experts: Sequence[Decisions]) -> bool:
    """Whether two experts contradict each other, see CONTRADICTION."""
    return any(agreement(one, other) < CONTRADICTION for one, other in combinations(experts, 2))


class RoutedModel(nn.Module):
    """The outside model: images (N, C, H, W) to probabilities by a routed network; `adapt` fits it
    to unlabelled images.

    Attributes:
        counts_images: whether the numbers of `report` are counts of images; here they are of
            epochs.
        gated: whether the gate is used; not with objective=paper.
        adaptation: the record of `adapt`; before the first epoch and after each one the "losses"
            over all images, the "information" and "agreement" of the predictions, and "refused",
            the gate's reason or ""; "chosen", the index of the used state; "start", the mixture or
            an expert; "running_statistics", whether it is normalised by its own; "coefficients", R
            by layer, averaged over the images. Empty before.
    """

    counts_images = False

    def __init__(
        self,
        task: TaskConfig,
        network: RoutedNetwork,
        experts: Sequence[str],
        hyper: OutsideHyper,
        seed: int,
    ):
        """`experts`: names of the network's experts."""
        super().__init__()
        self.task = task
        self.network = network
        self.hyper = hyper
        self.seed = seed
        self.gated = hyper.objective != "paper"
        self.adaptation: dict[str, Any] = {}
        self._experts = tuple(experts)
        self._mixture = network.adapted_state()

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities (N, outputs, ...), in the batches of `adapt`."""
        self.network.eval()
        return torch.cat([self._probabilities(part) for part in self._batches(images)])

    def _batches(self, images: Tensor) -> tuple[Tensor, ...]:
        """Even batches of at most the task's size, so that their statistics do not depend on the
        caller's batches.
        """
        return images.tensor_split(math.ceil(len(images) / self.task.batch_size))

    def _probabilities(self, images: Tensor) -> Tensor:
        return self.task.probabilities(self.network(images))

    def adapt(self, batches: Sequence[Tensor] | Repeated[Tensor]) -> None:
        """Fit the coefficients to these images.

        After every epoch the state is evaluated on all images, without dropout and with the same
        noise, so that epochs can be compared. The start is a candidate too; states that the gate
        refuses are not.
        """
        parts = Repeated(lambda: chain.from_iterable(map(self._batches, batches)))
        starts, decisions = self._starts(parts)
        references = list(decisions.values())
        start, start_summary = self._most_stable(starts, parts, references)
        self.load_start(*start)
        optimizer = torch.optim.Adam(self.network.adaptable().values(), lr=self.hyper.route_lr)
        # The candidates are the start and the state after every epoch.
        summaries = [start_summary]
        refused = [""]
        chosen = 0
        chosen_state = self.network.adapted_state()
        for epoch in range(self.hyper.route_epochs):
            for batch, images in enumerate(parts):
                self._step(optimizer, images, "epoch", epoch, batch)
            summary = self.measure(parts, references)
            reason = gate_refusal(summary, start_summary) if self.gated else ""
            if not reason and summary.loss < summaries[chosen].loss:
                chosen = epoch + 1
                chosen_state = self.network.adapted_state()
            summaries.append(summary)
            refused.append(reason)
        self.network.load_adapted_state(chosen_state)
        self.network.eval()
        self.adaptation = {
            "start": start.expert,
            "running_statistics": start.running,
            "losses": [summary.loss for summary in summaries],
            "information": [summary.information for summary in summaries],
            "agreement": [summary.agreement for summary in summaries],
            "refused": refused,
            "chosen": chosen,
            "coefficients": self._mean_coefficients(parts),
        }

    def _mean_coefficients(self, batches: Iterable[Tensor]) -> dict[str, list[float]]:
        """R by layer, averaged over the images."""
        by_batch = [self.network.coefficients(images) for images in batches]
        means = {}
        for layer in by_batch[0]:
            of_images = torch.cat([by_layer[layer] for by_layer in by_batch])
            means[layer] = of_images.mean(dim=0).tolist()
        return means

    def _starts(self, parts: Iterable[Tensor]) -> tuple[list[Start], dict[Start, PackedDecisions]]:
        """The possible starts of the fit, and the decisions with which a state may agree: of the
        mixture and, with the gate, of each expert.

        The mixture is the only start unless personal models contradict each other. The global model
        is no start, as the mean of models that contradict each other.
        """
        mixture = Start(MIXTURE)
        decisions = {mixture: self._start_decisions(mixture, parts)}
        if not self.gated:
            return [mixture], decisions
        *personal, global_model = (Start(expert) for expert in self._experts)
        for start in (*personal, global_model):
            decisions[start] = self._start_decisions(start, parts)
        if not contradict([decisions[start] for start in personal]):
            return [mixture], decisions
        running = []
        if self.network.norms:
            running = [start._replace(running=True) for start in personal]
        for start in running:
            decisions[start] = self._start_decisions(start, parts)
        return [mixture, *personal, *running], decisions

    def _most_stable(
        self, starts: Sequence[Start], parts: Iterable[Tensor], references: Sequence[Decisions]
    ) -> tuple[Start, StateSummary]:
        """The start of the least `instability` (the first if several are equal), and its summary.

        The lowest loss does not decide: an expert of other images can be certain, and wrong.
        """
        summaries = {}
        for start in starts:
            self.load_start(*start)
            summaries[start] = self.measure(parts, references)
        chosen = min(summaries, key=lambda start: summaries[start].instability)
        return chosen, summaries[chosen]

    def load_start(self, expert: str, running: bool = False) -> None:
        """Load the state of an expert, with its own base, or of the mixture, whose base is the
        global model.

        Args:
            running: normalise by the base's running statistics.
        """
        if expert == MIXTURE:
            base = -1
            self.network.load_adapted_state(self._mixture)
        else:
            base = self._experts.index(expert)
            self.network.prefer(base)
        self.network.set_base(base, running)

    @torch.no_grad()
    def _start_decisions(self, start: Start, batches: Iterable[Tensor]) -> PackedDecisions:
        """The decisions of a start."""
        self.load_start(*start)
        self.network.eval()
        decisions = PackedDecisions()
        for images in batches:
            decisions.append(_decisions(self._probabilities(images), self.task))
        return decisions

    @torch.no_grad()
    def measure(
        self, batches: Iterable[Tensor], references: Sequence[Decisions] = ()
    ) -> StateSummary:
        """The summary of the current state over all images of these batches, without dropout."""
        self.network.eval()

        def results() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for batch, images in enumerate(batches):
                clean, noisy = self._predictions(images, "measure", batch)
                loss = test_time_loss(clean, noisy, self.task, self.hyper)
                both = (formulas.all_classes(p, self.task.target) for p in (clean, noisy))
                yield loss, formulas.consistency_loss(*both), clean

        return summarize_state(self.task, results(), references)

    def _step(self, optimizer: Optimizer, images: Tensor, *key: str | int) -> None:
        self.network.train()
        with seeded(self.seed, "dropout", *key):
            clean, noisy = self._predictions(images, *key)
        optimizer.zero_grad()
        test_time_loss(clean, noisy, self.task, self.hyper).backward()
        optimizer.step()

    def _predictions(self, images: Tensor, *key: str | int) -> tuple[Tensor, Tensor]:
        """Probabilities for a batch and for its noisy copy, whose noise `key` seeds."""
        generator = torch_generator(self.seed, "noise", *key)
        noise = torch.randn(images.shape, generator=generator).to(images)
        clean = self._probabilities(images)
        scale = self.hyper.noise * formulas.image_spread(images)
        noisy = self._probabilities(images + scale * noise)
        return clean, noisy

    def report(self) -> dict[str, Any]:
        return self.adaptation

    def notices(self) -> list[str]:
        """One line if the gate refused the state of the lowest loss; empty otherwise."""
        refused = self.adaptation.get("refused", [])
        if not any(refused):
            return []
        losses = self.adaptation["losses"]
        chosen = self.adaptation["chosen"]
        states = [state for state, refusal in enumerate(refused) if refusal]
        lowest = min([chosen, *states], key=losses.__getitem__)
        if lowest == chosen:
            return []
        used = f"the start ({self.adaptation.get('start', MIXTURE)})"
        if chosen:
            used = f"the state after epoch {chosen}"
        reason = refused[lowest]
        return [f"routing uses {used}, although the loss was lower after epoch {lowest}: {reason}"]


def test_time_loss(p: Tensor, p_noisy: Tensor, task: TaskConfig, hyper: OutsideHyper) -> Tensor:
    """Eq. 10 with the terms and weights of `hyper`, a scalar.

    Args:
        p: probabilities (N, outputs, ...) for the images.
        p_noisy: those for their noisy copies.
    """
    classes = formulas.all_classes(p, task.target)
    zero = p.new_zeros(())
    consistency = zero
    shape = zero
    entropy = zero
    information = zero
    if hyper.use_consistency:  # Eq. 7
        classes_noisy = formulas.all_classes(p_noisy, task.target)
        consistency = formulas.consistency_loss(classes, classes_noisy)
    if hyper.use_shape and task.kind == "segmentation":  # Eq. 8-9
        radius = hyper.radius
        if radius == "auto":
            radius = formulas.window_radius(p.shape[2:])
        shape = formulas.shape_loss(classes, radius)
    if hyper.use_entropy:  # Eq. 9
        entropy = formulas.entropy_loss(classes)
    if hyper.objective == "paper":  # Eq. 10
        return formulas.total_loss(consistency, shape, entropy, hyper.beta)
    if hyper.use_entropy:
        information = formulas.mean_entropy(classes) - entropy
    return formulas.information_total(consistency, shape, information, hyper.beta)


test_time_loss.__test__ = False  # type: ignore[attr-defined]  # not a test, in spite of its name


# Final models


def routed_message(incoming: Message, hyper: OutsideHyper, seed: int) -> Message:
    """A model of kind "routed", not yet fitted, from a message with w_g and every P_k."""
    fields = dataclasses.fields(OutsideHyper)
    settings = {field.name: getattr(hyper, field.name) for field in fields}
    meta = {**incoming.meta, "kind": "routed", "routing": settings, "seed": seed}
    return Message(dict(incoming.states), meta)


def routed_model(task: TaskConfig, message: Message) -> RoutedModel:
    """The module of a final model of kind "routed", with the fitted coefficients if it has them.

    Raises:
        StateError: experts that do not fit the task's network, coefficients of other settings, or a
            start that is no expert.
    """
    names = {field.name for field in dataclasses.fields(OutsideHyper)}
    # Models of 0.2 have the printed objective, and settings that no longer exist.
    stored = {"objective": "paper", **message.meta["routing"]}
    settings = {name: value for name, value in stored.items() if name in names}
    hyper = build_hyper(OutsideHyper, settings)
    seed = int(message.meta["seed"])
    personal = message.family(EXPERTS)
    states = [*personal.values(), message[MODEL]]
    experts = [*personal, "global"]
    usual = "sigmoid" if hyper.objective == "paper" else "softmax"
    coefficients = stored.get("coefficients", usual)
    routing = Routing(hyper.routing == "layer", coefficients, hyper.bn_statistics, seed)
    network = RoutedNetwork(network_with(task, states[-1]), states, routing)
    model = RoutedModel(task, network, experts, hyper, seed)
    model.adaptation = message.meta.get("adaptation", {})
    expert = model.adaptation.get("start", MIXTURE)
    if expert not in (MIXTURE, *experts):
        raise StateError(f"a routed model starts from {expert!r}, and has no such expert")
    model.load_start(expert, model.adaptation.get("running_statistics", False))
    if ROUTER in message:
        network.load_adapted_state(message[ROUTER])
    return model.eval()


class Ensemble(nn.Module):
    """Mean logits of several networks (Table II, "Ensemble"): images (N, C, H, W) to
    probabilities.
    """

    def __init__(self, task: TaskConfig, networks: Sequence[nn.Module]):
        super().__init__()
        self.task = task
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor) -> Tensor:
        logits = torch.stack([network(images) for network in self.networks])
        return self.task.probabilities(logits.mean(dim=0))


def ensemble_model(task: TaskConfig, message: Message) -> Ensemble:
    """The module of a final model of kind "ensemble": every entry of the message is a member."""
    networks = [network_with(task, state) for _, state in sorted(message.states.items())]
    return Ensemble(task, networks).eval()
