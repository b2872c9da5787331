"""How far FedDAG's generator moves features, by what its loss is; one site, no federation.

    python benchmarks/generator_attack.py --seeds 0,1,2,3,4 --alpha 1      # small_cnn from random weights
    python benchmarks/generator_attack.py --task TASK.json --site NAME --data DATA --steps 60

A model is trained for 80 steps and then frozen. For each loss a generator learns on the site's batches to move the features of
x^ = x + α G(x) away from those of x. Printed, as mean and [lowest, highest] of the seeds: the mean of 1 - cos of both features; the same
after the mean of the batch is taken away, which is 0 if all images move together; the share of wrong answers for x^. For comparison: two
different images, noise, and projected gradient steps on the images themselves. docs/benchmarks.md has the numbers.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.data.loading import Batch
from medflare.methods.feddag.formulas import instance_discrepancy
from medflare.methods.feddag.generator import generated
from medflare.methods.feddag.site import FedDAGSiteHyper, channel_deviations, initial_generator
from medflare.methods.parts.normalisation import batch_statistics
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, pooled
from medflare.networks.weights import starting_state
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.epochs import trainable
from medflare.training.opening import open_site
from medflare.training.site import Site

MODEL_STEPS = 80
ASCENT_STEPS = 30
MEASURED_BATCHES = 4


class Loss(NamedTuple):
    """What the generator minimises: task term - weight * discrepancy."""

    name: str
    weight: float = 1.0
    task: bool = True
    misclassified: bool = False  # the task term counts wrongly answered images only
    centred: bool = False
    cap: float = 2.0  # m of Eq. 1; 2: none


LOSSES = (
    Loss("Eq. 1 and 3, m = 0.1", cap=0.1),
    Loss("Eq. 1 and 3"),
    Loss("Eq. 1 alone", task=False),
    Loss("Eq. 1 times 20", weight=20),
    Loss("Eq. 3 while misclassified", misclassified=True),
    Loss("Eq. 1 on centred features", centred=True),
)


def centred(features: Tensor, moved: Tensor) -> Tensor:
    """1 - cos after the batch's mean feature is taken away, (N,)."""
    mean = features.mean(dim=0, keepdim=True)
    return instance_discrepancy(features - mean, moved - mean)


class Attack:
    """A frozen model and the site's images."""

    def __init__(self, site: Site, model: FeatureNetwork, batches: Iterator[Batch], alpha: float):
        self.site = site
        self.model = model
        self.batches = batches
        self.alpha = alpha
        self.model.eval()
        deviations = channel_deviations(batch.images for batch in site.ordered("train"))
        self.unit = torch.tensor(deviations).float().view(-1, *[1] * site.task.spatial_dims)
        self.measured = [next(batches) for _ in range(MEASURED_BATCHES)]

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(features, logits), normalised by the batch as in training."""
        with batch_statistics(self.model):
            features, logits = self.model.features_and_output(images)
        return pooled(features), logits

    def measure(self, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(3,): both distances and the share of wrong answers; `change`: (images, targets) -> changed images."""
        rows = []
        for images, targets, _ in self.measured:
            changed = change(images, targets).detach()
            with torch.no_grad():
                before, _ = self.features(images)
                after, logits = self.features(changed)
            wrong = (logits.argmax(dim=1) != targets).float()
            rows.append(
                [
                    instance_discrepancy(before, after).mean(),
                    centred(before, after).mean(),
                    wrong.mean(),
                ]
            )
        return torch.tensor(rows).mean(dim=0)

    def shuffled(self, images: Tensor, targets: Tensor) -> Tensor:
        return images.roll(1, dims=0)

    def noisy(self, images: Tensor, targets: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.site.seed)
        signs = torch.randint(0, 2, images.shape, generator=generator) * 2 - 1
        return images + self.alpha * self.unit * signs

    def ascended(self, images: Tensor, targets: Tensor) -> Tensor:
        """Projected sign-gradient steps on each image, as far from its features as they lead within α."""
        with torch.no_grad():
            before, _ = self.features(images)
        limit = self.alpha * self.unit
        change = self.noisy(images, targets) - images
        change = 0.1 * change
        for _ in range(ASCENT_STEPS):
            change.requires_grad_(True)
            after, _ = self.features(images + change)
            (gradient,) = torch.autograd.grad(centred(before, after).mean(), change)
            change = (change + 0.1 * limit * gradient.sign()).detach()
            change = torch.maximum(torch.minimum(change, limit), -limit)
        return images + change

    def generator(self, loss: Loss, steps: int) -> Callable[[Tensor, Tensor], Tensor]:
        """A generator that has learnt with this loss, as a change of images."""
        network = initial_generator(self.site.task, self.site.seed, FedDAGSiteHyper())
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(steps):
            images, targets, _ = next(self.batches)
            with torch.no_grad():
                before, _ = self.features(images)
            after, logits = self.features(
                generated(images, network(images), self.alpha, unit=self.unit)
            )
            distance = (
                centred(before, after) if loss.centred else instance_discrepancy(before, after)
            )
            total = -loss.weight * distance.clamp(max=loss.cap).mean()
            if loss.task:
                each = F.cross_entropy(logits, targets, reduction="none")
                if loss.misclassified:
                    each = each * (logits.argmax(dim=1) != targets)
                total = total + each.mean()
            optimizer.zero_grad()
            total.backward(inputs=list(network.parameters()))
            optimizer.step()
        return lambda images, targets: generated(
            images, network(images), self.alpha, unit=self.unit
        )


def endless(site: Site) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from site.batches("train", epoch, "model", 0)
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="mechanisms/shifted_light", help="a classification task")
    parser.add_argument("--site", default="A")
    parser.add_argument("--data", help="folder with a folder for each site")
    parser.add_argument("--steps", type=int, default=200, help="of each generator")
    parser.add_argument("--alpha", type=float, default=0.3, help="reach of the generator")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = load_task(options.task)
    measured = defaultdict(list)
    for seed in map(int, options.seeds.split(",")):
        for name, numbers in rows_of(task, seed, options).items():
            measured[name].append(numbers)
    print("| images | 1 - cos | centred | wrong answers |\n|---|---|---|---|")
    for name, of_seeds in measured.items():
        cells = []
        for values in torch.stack(of_seeds).T:
            cells.append(f"{values.mean():.2f} [{values.min():.2f}, {values.max():.2f}]")
        print(f"| {name} | {' | '.join(cells)} |")


def rows_of(task: TaskConfig, seed: int, options: argparse.Namespace) -> dict[str, Tensor]:
    """Name of a row -> `Attack.measure`, for the model and the generators of one seed."""
    site = open_site(options.site, task, seed=seed, data_root=options.data)
    model = initial_network(task, seed, start=starting_state(task, seed))
    optimizer = site.optimizer(trainable(model))
    batches = endless(site)
    model.train()
    for _ in range(MODEL_STEPS):
        images, targets, _ = next(batches)
        optimizer.zero_grad()
        site.loss(model(images), targets).backward()
        optimizer.step()
    attack = Attack(site, model, batches, options.alpha)
    rows = {
        "another image": attack.measure(attack.shuffled),
        "noise": attack.measure(attack.noisy),
        "gradient steps on the images": attack.measure(attack.ascended),
    }
    for loss in LOSSES:
        rows[f"generator, {loss.name}"] = attack.measure(attack.generator(loss, options.steps))
    return rows


if __name__ == "__main__":
    main()
