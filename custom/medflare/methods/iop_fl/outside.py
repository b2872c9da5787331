"""IOP-FL at a site that never trained: test-time routing over all personal models and the global one (Sec. III-C, Algorithm 1).

The coefficients of every layer (`medflare.methods.iop_fl.routing`) are fitted to the site's unlabelled images by consistency under
noise, shape and certainty (Eq. 7-10); of the states that pass the gate (`gate`) the one with the lowest loss is kept, so labels decide
nothing.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medflare.core.hyper import build_hyper
from medflare.core.manifest import MetaSpec, TensorSpec, listing, number
from medflare.core.message import Message
from medflare.core.rng import seeded, torch_generator
from medflare.inference.deployed import MODEL, Repeated, network_with
from medflare.methods.iop_fl import formulas
from medflare.methods.iop_fl.gate import Gate, Gathering, Look, Range
from medflare.methods.iop_fl.hyper import OutsideHyper
from medflare.methods.iop_fl.routing import RoutedNetwork
from medflare.tasks.config import TaskConfig

EXPERT = TensorSpec("expert/")  # the sites' personal models
ROUTER = "router"  # the entry of the fitted coefficients


def _range(value: object) -> str | None:
    """What is wrong with (smallest, largest) share."""
    if problem := listing(number(0.0, 1.0), 2)(value):
        return problem
    return None if len(value) == 2 else "is no pair of a smallest and a largest share"  # type: ignore[arg-type]  # a list


SHARES = MetaSpec("shares", "the inside sites' range of every foreground class's share", listing(_range))


class RoutedModel(nn.Module):
    """The outside model: images (N, C, H, W) to probabilities by a routed network; `adapt` fits it to unlabelled images.

    Args:
        ranges: see `Gate`.

    Attributes:
        adaptation: what `adapt` did: by place, before the first epoch and after each one, the "losses" over all images, the
            "information" and the "agreement" of the predictions; "refused", what the gate said of those that it refused; "chosen", the
            place of the state that was kept; and "coefficients", R by layer, averaged over the images. Empty before.
    """

    def __init__(self, task: TaskConfig, network: RoutedNetwork, hyper: OutsideHyper, seed: int, ranges: Sequence[Range] = ()):
        super().__init__()
        self.task, self.network, self.hyper, self.seed = task, network, hyper, seed
        self.gate = Gate(hyper.gate_information, hyper.gate_agreement, hyper.gate_share, ranges)
        self.adaptation: dict[str, Any] = {}
        self._start = network.adapted_state()

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities (N, outputs, ...), cut into batches as `adapt` cuts them."""
        self.network.eval()
        return torch.cat([self._probabilities(part) for part in self._cut(images)])

    def _cut(self, images: Tensor) -> tuple[Tensor, ...]:
        """Even batches of at most the task's size: how many images a caller hands over at once must not shape their statistics."""
        return images.tensor_split(math.ceil(len(images) / self.task.batch_size))

    def _probabilities(self, images: Tensor) -> Tensor:
        return self.task.probabilities(self.network(images))

    @torch.no_grad()
    def _at_start(self, images: Tensor) -> Tensor:
        """Probabilities of the state before the first step, without dropout."""
        start = {name: tensor.to(images.device) for name, tensor in self._start.items()}
        self.network.eval()
        return self.task.probabilities(functional_call(self.network, start, (images,)))

    def adapt(self, batches: Sequence[Tensor] | Repeated[Tensor]) -> None:
        """Fit the coefficients to these images, cut as `forward` cuts them; whatever they were fitted to before is forgotten.

        Every epoch ends with one look at all images, without dropout and with the same noise each time, so that two epochs can be
        compared; the start is a candidate too, so the result is never worse than no adaptation by that measure. What the gate refuses
        is none.
        """
        parts = Repeated(lambda: (part for images in batches for part in self._cut(images)))
        self.network.load_adapted_state(self._start)
        optimizer = torch.optim.Adam(self.network.adaptable().values(), lr=self.hyper.route_lr)
        looks, kept, chosen = [self.look(parts)], self.network.adapted_state(), 0
        refused: dict[int, str] = {}
        for epoch in range(self.hyper.route_epochs):
            for place, images in enumerate(parts):
                self._step(optimizer, images, "epoch", epoch, place)
            looks.append(self.look(parts))
            if reason := self.gate.refusal(looks[-1], looks[0]):
                refused[epoch + 1] = reason
            elif looks[-1].loss < looks[chosen].loss:
                kept, chosen = self.network.adapted_state(), epoch + 1
        self.network.load_adapted_state(kept)
        self.adaptation = {
            "losses": [look.loss for look in looks],
            "information": [look.information for look in looks],
            "agreement": [look.agreement for look in looks],
            "refused": [refused.get(place, "") for place in range(len(looks))],
            "chosen": chosen,
            "coefficients": self._coefficients(parts),
        }

    def _coefficients(self, batches: Iterable[Tensor]) -> dict[str, list[float]]:
        self.network.eval()
        found = [self.network.coefficients(images) for images in batches]
        return {layer: torch.cat([r[layer] for r in found]).mean(dim=0).tolist() for layer in found[0]}

    @torch.no_grad()
    def look(self, batches: Iterable[Tensor]) -> Look:
        """The state of the moment by all images of these batches, dropout off."""
        self.network.eval()
        gathering = Gathering(self.task)
        for place, images in enumerate(batches):
            clean, noisy, start = self._answers(images, "measure", place)
            gathering.add(test_time_loss(clean, noisy, self.task, self.hyper, start), clean, start)
        return gathering.look()

    def _step(self, optimizer: torch.optim.Optimizer, images: Tensor, *key: str | int) -> None:
        self.network.train()
        with seeded(self.seed, "dropout", *key):
            clean, noisy, start = self._answers(images, *key)
        optimizer.zero_grad()
        test_time_loss(clean, noisy, self.task, self.hyper, start).backward()
        optimizer.step()

    def _answers(self, images: Tensor, *key: str | int) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities for a batch of unlabelled images, for its noisy copy, whose noise `key` names, and those of the start."""
        noise = torch.randn(images.shape, generator=torch_generator(self.seed, "noise", *key)).to(images)
        clean = self._probabilities(images)
        noisy = self._probabilities(images + self.hyper.noise * formulas.image_spread(images) * noise)
        return clean, noisy, self._at_start(images)  # the start comes last: it leaves the routers without dropout

    def report(self) -> dict[str, Any]:
        """What `adapt` did, see `adaptation`."""
        return self.adaptation

    def notices(self) -> list[str]:
        """That the gate refused the state of the lowest loss, and what was kept in its place; nothing where it did not."""
        losses, refused, chosen = (self.adaptation.get(name, []) for name in ("losses", "refused", "chosen"))
        better = [place for place, reason in enumerate(refused) if reason and losses[place] < losses[chosen]]
        if not better:
            return []
        kept = f"the state after epoch {chosen}" if chosen else "the start, whose coefficients are uniform or drawn,"
        lost = min(better, key=losses.__getitem__)
        return [f"routing kept {kept} although the loss was lower after epoch {lost}: {refused[lost]}"]


def test_time_loss(p: Tensor, p_noisy: Tensor, task: TaskConfig, hyper: OutsideHyper, start: Tensor) -> Tensor:
    """Eq. 10 with the terms, classes and weights that `hyper` asks for.

    Args:
        p: the network's probabilities (N, outputs, ...) for the images.
        p_noisy: those for their perturbed copies.
        start: those of the starting state for the images.

    Returns:
        A scalar; 0 where every term is switched off.
    """
    every, every_noisy = (formulas.all_classes(q, task.target) for q in (p, p_noisy))
    consistency = shape = entropy = information = p.new_zeros(())
    if hyper.use_consistency:
        consistency = formulas.consistency_loss(every, every_noisy)
    if hyper.use_shape and task.kind == "segmentation":
        shape = formulas.shape_loss(every, formulas.window_radius(p.shape[2:]) if hyper.radius == "auto" else hyper.radius)
    if hyper.use_entropy:
        entropy = formulas.entropy_loss(every)
    if hyper.objective == "paper":
        return formulas.total_loss(consistency, shape, entropy, hyper.beta)
    if hyper.use_entropy:
        information = formulas.mean_entropy(every) - entropy
    leaving = formulas.divergence(formulas.all_classes(start, task.target), every)
    return formulas.information_total(consistency, shape, information, leaving, hyper.beta, hyper.anchor)


test_time_loss.__test__ = False  # type: ignore[attr-defined]  # the paper's name for it, not a test


# -- delivered models ----------------------------------------------------------------------------------------------------------


def routed_message(incoming: Message, hyper: OutsideHyper, seed: int) -> Message:
    """A model of kind "routed", not yet fitted, from a delivery that holds w_g and every P_k."""
    settings = {field.name: getattr(hyper, field.name) for field in dataclasses.fields(OutsideHyper)}
    return Message(dict(incoming.states), {**incoming.meta, "kind": "routed", "routing": settings, "seed": seed})


def routed_model(task: TaskConfig, message: Message) -> RoutedModel:
    """The module of a delivered model of kind "routed", with the fitted coefficients where it holds them.

    Raises:
        StateError: experts that do not fit the task's network, or coefficients of other settings.
    """
    known = {field.name for field in dataclasses.fields(OutsideHyper)}  # models that were stored before have settings that are gone
    settings = {"coefficients": "sigmoid", **{name: value for name, value in message.meta["routing"].items() if name in known}}
    hyper, seed = build_hyper(OutsideHyper, settings), int(message.meta["seed"])
    states = [*EXPERT.family(message.states).values(), message.states[MODEL]]
    network = RoutedNetwork(network_with(task, states[-1]), states, hyper.routed(seed))
    model = RoutedModel(task, network, hyper, seed, [(low, high) for low, high in message.meta.get(SHARES, [])])
    if ROUTER in message.states:
        network.load_adapted_state(message.states[ROUTER])
    model.adaptation = message.meta.get("adaptation", {})
    return model.eval()


class Ensemble(nn.Module):
    """Average logits of several networks (Table II, "Ensemble"): images (N, C, H, W) to probabilities."""

    def __init__(self, task: TaskConfig, networks: Sequence[nn.Module]):
        super().__init__()
        self.task = task
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to the probabilities of the mean logits, (N, outputs, ...)."""
        return self.task.probabilities(torch.stack([network(images) for network in self.networks]).mean(dim=0))


def ensemble_model(task: TaskConfig, message: Message) -> Ensemble:
    """The module of a delivered model of kind "ensemble": every entry of the message is a member."""
    return Ensemble(task, [network_with(task, state) for _, state in sorted(message.states.items())]).eval()
