"""IOP-FL at a site that never trained: test-time routing over all personal models and the global one (Sec. III-C, Algorithm 1).

The coefficients of every layer (`medflare.inference.routing`) are fitted to the site's unlabelled images by consistency under
noise, shape and entropy (Eq. 7-10); the state with the lowest loss is kept, so labels decide nothing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.hyper import build_hyper, param
from medflare.core.message import Message
from medflare.core.rng import seeded, torch_generator
from medflare.core.states import StateDict
from medflare.inference.deployed import MODEL, network_with
from medflare.inference.routing import RoutedNetwork, Routing
from medflare.methods.iop_fl import formulas as iop_math
from medflare.tasks.config import TaskConfig

EXPERT = "expert/"  # entries of the sites' personal models: "expert/<site>"
ROUTER = "router"  # the entry of the fitted coefficients


@dataclass(frozen=True)
class OutsideHyper:
    router: str = param(
        "mlp", "coefficients from a layer's pooled input, or free numbers", symbol="θ", source="Eq. 6", choices=("mlp", "free")
    )
    routing: str = param(
        "layer", "coefficients for every layer, or one set for the network", symbol="R", source="Table III", choices=("layer", "global")
    )
    router_start: str = param(
        "uniform", "every coefficient 1/(K+1), or random as in the code", source="Alg. 1", choices=("uniform", "random")
    )
    router_dropout: float = param(0.2, "dropout of the mlp router while it is fitted", source="code", low=0, high=0.99)
    predict_dropout: bool = param(False, "leave that dropout on for predictions, as in the code", source="code")
    fixed_layers: str = param("", "layers, separated by commas, that keep their first coefficients (code: the bottleneck)", source="code")
    bn_statistics: str = param(
        "batch", "normalise by the test batch, each image, or as in training", source="Sec. III-C", choices=("batch", "instance", "running")
    )
    train_bn_affine: bool = param(False, "fit scale and shift of BatchNorm too, as in the code", source="code")
    route_epochs: int = param(10, "passes over the test images", source="Sec. III-D", low=0)
    route_lr: float = param(1e-3, "Adam rate of the routers", source="Sec. III-D", low=0)
    beta: float = param(0.01, "weight of shape and entropy beside consistency", symbol="β", source="Eq. 10", low=0)
    radius: int = param(10, "the shape term's neighbourhood radius in pixels", symbol="d", source="Eq. 8; value of the code", low=0)
    noise: float = param(0.5, "standard deviation of the noise added to images", symbol="ε", source="Eq. 7", low=0)
    perturbation: str = param(
        "noise", "noise alone, or quarter turns and flips too", source="Eq. 7 / code", choices=("noise", "noise+turns")
    )
    fresh_noise: bool = param(True, "new noise at every step; false: the same each time, as in the code", source="code")
    stop_gradient: bool = param(False, "treat the prediction of the clean image as fixed in the consistency term", source="Eq. 7")
    use_consistency: bool = param(True, "the consistency term", symbol="L_cons", source="Eq. 7, Fig. 8")
    use_shape: bool = param(True, "the shape term (segmentation only)", symbol="L_s", source="Eq. 9, Fig. 8")
    use_entropy: bool = param(True, "the entropy term", symbol="L_e", source="Eq. 9, Fig. 8")
    shape_classes: str = param("all", "classes in the shape term", source="Eq. 8", choices=("all", "foreground"))
    shape_sum: str = param("mean", "shape term per pixel, or summed over an image as printed", source="Eq. 9", choices=("mean", "sum"))
    objective: str = param(
        "paper", "Eq. 10, or the published code's terms and weights", source="Eq. 10 / code", choices=("paper", "official")
    )
    choose: str = param("lowest", "keep the state with the lowest loss, or the last one", source="Sec. III-D", choices=("lowest", "last"))
    online: bool = param(False, "one more step on every batch just before it is predicted", source="code")
    comparisons: bool = param(False, "deliver each single model, their ensemble and Tent on the global model too", source="Table II")
    ensemble_global: bool = param(False, "the global model takes part in the ensemble", source="Table II")

    def routed(self, seed: int) -> Routing:
        return Routing(
            router="mlp" if self.router == "mlp" else "free",
            per_layer=self.routing == "layer",
            uniform=self.router_start == "uniform",
            dropout=self.router_dropout,
            statistics=self.bn_statistics,  # type: ignore[arg-type]  # one of `Statistics` by its choices
            train_affine=self.train_bn_affine,
            fixed_layers=tuple(name.strip() for name in self.fixed_layers.split(",") if name.strip()),
            seed=seed,
        )


class RoutedModel(nn.Module):
    """The outside model: images (N, C, H, W) to probabilities by a routed network; `adapt` fits it to unlabelled images.

    Attributes:
        adaptation: what `adapt` did: "losses" over all images before the first epoch and after each one, "chosen", the place of
            the state that was kept among them, and "coefficients", R by layer, averaged over the images. Empty before.
    """

    def __init__(self, task: TaskConfig, network: RoutedNetwork, hyper: OutsideHyper, seed: int):
        super().__init__()
        self.task, self.network, self.hyper, self.seed = task, network, hyper, seed
        self.adaptation: dict[str, Any] = {}
        self._start = network.adapted_state()
        self.online_steps = 0
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.adaptable().values(), lr=self.hyper.route_lr)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self._predicted(part) for part in self._cut(images)])

    def _cut(self, images: Tensor) -> tuple[Tensor, ...]:
        """Even batches of at most the task's size: how many images a caller hands over at once must not shape their statistics."""
        return images.tensor_split(math.ceil(len(images) / self.task.batch_size))

    def _predicted(self, images: Tensor) -> Tensor:
        if self.hyper.online:
            self._online_step(images)
        self.network.train(self.hyper.predict_dropout)
        with seeded(self.seed, "predict"):
            return self._probabilities(images)

    def _probabilities(self, images: Tensor) -> Tensor:
        return self.task.probabilities(self.network(images))

    def adapt(self, batches: Sequence[Tensor]) -> None:
        """Fit the coefficients to these images, cut as `forward` cuts them; whatever they were fitted to before is forgotten.

        Every epoch ends with one look at all images, without dropout and with the same noise each time, so that the losses of
        two epochs can be compared; the start is a candidate too, so the result is never worse than no adaptation by that measure.
        """
        batches = [part for images in batches for part in self._cut(images)]
        self.network.load_adapted_state(self._start)
        self.optimizer, self.online_steps = self._new_optimizer(), 0
        losses, kept, chosen = [self.measure(batches)], self.network.adapted_state(), 0
        for epoch in range(self.hyper.route_epochs):
            for place, images in enumerate(batches):
                self._step(images, "epoch", epoch, place)
            losses.append(self.measure(batches))
            if self.hyper.choose == "last" or losses[-1] < losses[chosen]:
                kept, chosen = self.network.adapted_state(), epoch + 1
        self.network.load_adapted_state(kept)
        self.adaptation = {"losses": losses, "chosen": chosen, "coefficients": self._coefficients(batches)}

    def _coefficients(self, batches: Sequence[Tensor]) -> dict[str, list[float]]:
        self.network.eval()
        found = [self.network.coefficients(images) for images in batches]
        return {layer: torch.cat([r[layer] for r in found]).mean(dim=0).tolist() for layer in found[0]}

    @torch.no_grad()
    def measure(self, batches: Sequence[Tensor]) -> float:
        """Mean test-time loss over all images of these batches, dropout off."""
        self.network.eval()
        values = [float(self.loss(images, "measure", place)) * len(images) for place, images in enumerate(batches)]
        return sum(values) / sum(map(len, batches))

    def _step(self, images: Tensor, *key: str | int) -> None:
        self.network.train()
        with seeded(self.seed, "dropout", *key):
            loss = self.loss(images, *(key if self.hyper.fresh_noise else ("fixed",)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _online_step(self, images: Tensor) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._step(images.clone() if images.is_inference() else images, "online", self.online_steps)
        self.online_steps += 1

    def loss(self, images: Tensor, *key: str | int) -> Tensor:
        """L_t of Eq. 10 for a batch of unlabelled images; `key` names the noise."""
        clean = self._probabilities(images)
        noisy = self._noisy_probabilities(images, torch_generator(self.seed, "noise", *key))
        return test_time_loss(clean, noisy, self.task, self.hyper)

    def _noisy_probabilities(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The prediction for a perturbed copy, brought back to the original's orientation."""
        noisy = images + self.hyper.noise * torch.randn(images.shape, generator=generator).to(images)
        if self.hyper.perturbation == "noise":
            return self._probabilities(noisy)
        step = 1 if images.shape[-1] == images.shape[-2] else 2  # a quarter turn would swap the sides of an oblong image
        turns = step * torch.randint(4 // step, (len(images),), generator=generator)
        flips = torch.randint(2, (len(images),), generator=generator)
        p = self._probabilities(iop_math.turned(noisy, turns, flips))
        return iop_math.turned_back(p, turns, flips) if self.task.kind == "segmentation" else p

    def report(self) -> dict[str, Any]:
        return self.adaptation


def test_time_loss(p: Tensor, p_noisy: Tensor, task: TaskConfig, hyper: OutsideHyper) -> Tensor:
    """Eq. 10 with the terms, classes and weights that `hyper` asks for.

    Args:
        p, p_noisy: the network's probabilities (N, outputs, ...) for the images and their perturbed copies.
    """
    every, every_noisy = (iop_math.all_classes(q, task.target) for q in (p, p_noisy))
    official, nothing = hyper.objective == "official", p.new_zeros(())
    consistency = shape = entropy = nothing
    if hyper.use_consistency:
        consistency = iop_math.consistency_loss(every.detach() if hyper.stop_gradient else every, every_noisy)
    if hyper.use_shape and task.kind == "segmentation":
        shape = _shape_term(p, every, task, hyper)
    if hyper.use_entropy:
        entropy = (iop_math.entropy_loss_official if official else iop_math.entropy_loss)(every)
    if official:
        return iop_math.total_loss_official(consistency, shape, entropy, every.shape[1])
    return iop_math.total_loss(consistency, shape, entropy, hyper.beta)


test_time_loss.__test__ = False  # type: ignore[attr-defined]  # the paper's name for it, not a test


def _shape_term(p: Tensor, every: Tensor, task: TaskConfig, hyper: OutsideHyper) -> Tensor:
    if hyper.objective == "official":
        return iop_math.shape_loss_official(iop_math.foreground(p, task.target), hyper.radius)
    chosen = every if hyper.shape_classes == "all" else iop_math.foreground(p, task.target)
    loss = iop_math.shape_loss(chosen, hyper.radius)
    return loss * (p.shape[-2] * p.shape[-1]) if hyper.shape_sum == "sum" else loss


# -- delivered models ----------------------------------------------------------------------------------------------------------


def experts_of(states: Mapping[str, StateDict]) -> dict[str, StateDict]:
    """site -> P_k, sorted, of a message that holds "expert/<site>" entries."""
    return {entry.removeprefix(EXPERT): states[entry] for entry in sorted(states) if entry.startswith(EXPERT)}


def routed_message(incoming: Message, hyper: OutsideHyper, seed: int) -> Message:
    """A model of kind "routed", not yet fitted, from a delivery that holds w_g and every P_k."""
    settings = {field.name: getattr(hyper, field.name) for field in dataclasses.fields(OutsideHyper)}
    return Message(dict(incoming.states), {**incoming.facts, "kind": "routed", "routing": settings, "seed": seed})


def routed_model(task: TaskConfig, message: Message) -> RoutedModel:
    """The module of a delivered model of kind "routed", with the fitted coefficients where it holds them.

    Raises:
        StateError: experts that do not fit the task's network, or coefficients of other settings.
    """
    hyper, seed = build_hyper(OutsideHyper, message.facts["routing"]), int(message.facts["seed"])
    states = [*experts_of(message.states).values(), message.states[MODEL]]
    network = RoutedNetwork(network_with(task, states[-1]), states, hyper.routed(seed))
    model = RoutedModel(task, network, hyper, seed)
    if ROUTER in message.states:
        network.load_adapted_state(message.states[ROUTER])
    model.adaptation = message.facts.get("adaptation", {})
    return model.eval()


class Ensemble(nn.Module):
    """Average logits of several networks (Table II, "Ensemble"): images (N, C, H, W) to probabilities."""

    def __init__(self, task: TaskConfig, networks: Sequence[nn.Module]):
        super().__init__()
        self.task = task
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor) -> Tensor:
        return self.task.probabilities(torch.stack([network(images) for network in self.networks]).mean(dim=0))


def ensemble_model(task: TaskConfig, message: Message) -> Ensemble:
    """The module of a delivered model of kind "ensemble": every entry of the message is a member."""
    return Ensemble(task, [network_with(task, state) for _, state in sorted(message.states.items())]).eval()
