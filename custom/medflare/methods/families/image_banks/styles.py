"""Banks of channel means and deviations: FedRDN and CCST."""

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medflare.methods import PersistentState, Plan, StateDict, TensorSpec, param, strict_dataclass
from medflare.methods.families.image_banks.bank import (
    BankHyper,
    BankSite,
    PreparedSite,
    prepared_model,
)

_CONSTANT = 1e-6  # a channel with a smaller deviation is only centred


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """μ and σ (N, C) of images (N, C, ...) over the pixels of each channel (FedRDN)."""
    variance, mean = torch.var_mean(images.flatten(2), dim=2, correction=0)
    return mean, variance.sqrt()


def stacked_statistics(images: Tensor) -> Tensor:
    """`channel_statistics` as one tensor (N, 2, C)."""
    return torch.stack(channel_statistics(images), dim=1)


def normalised(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """(x - μ) / σ (FedRDN) of images (N, C, ...), with statistics (C,) or (N, C)."""
    shape = (-1, images.shape[1], *[1] * (images.ndim - 2))
    scale = torch.where(deviation > _CONSTANT, deviation, 1.0)
    return (images - mean.reshape(shape)) / scale.reshape(shape)


def adain(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """σ_s (x - μ(x)) / σ(x) + μ_s (CCST), with a style (N, C) for each image (N, C, ...)."""
    shape = (*mean.shape, *[1] * (images.ndim - 2))
    content = normalised(images, *channel_statistics(images))
    return deviation.reshape(shape) * content + mean.reshape(shape)


def _statistics_of_site(site: BankSite) -> tuple[Tensor, Tensor]:
    """`channel_statistics` of all training images, on the CPU."""
    statistics = [channel_statistics(batch.images) for batch in site.site.ordered("train")]
    means, deviations = zip(*statistics, strict=True)
    return torch.cat(means).cpu(), torch.cat(deviations).cpu()


# -- FedRDN ----------------------------------------------------------------------------------------


def _statistics(plan: Plan, *axes: int) -> StateDict:
    """The shape of statistics behind further axes."""
    empty = torch.empty(*axes, plan.task.image_channels, device="meta")
    return {"mean": empty, "deviation": empty}


@strict_dataclass
class FedRDNHyper(BankHyper):
    """No further settings."""

    kind: ClassVar[str] = "channel_normalised"


class FedRDNSite(PreparedSite[FedRDNHyper]):
    """FedRDN (Yan et al., arXiv 2306.09363): normalisation by a random site's statistics.

    A site's statistics are the means of μ and σ over its training images. A training image is
    normalised by those of a random site, any other image by the site's. The paper has no outside
    sites: they use the mean of the bank, since they survey no images. The authors' code draws mean
    and deviation of two sites for a batch; as in the paper, here both are of one site, for each
    image.
    """

    change = staticmethod(normalised)
    entry = TensorSpec(
        "survey",
        "brightness and contrast of the training images by channel, which all sites receive",
        _statistics,
        measured="train",
    )
    statistics = PersistentState("statistics")

    def described(self) -> StateDict:
        if self.statistics is None:
            mean, deviation = _statistics_of_site(self)
            self.statistics = {"mean": mean.mean(dim=0), "deviation": deviation.mean(dim=0)}
        return self.statistics

    def numbers(self) -> StateDict:
        """The site's statistics inside, the mean of the bank outside."""
        return self.described() if self.inside else super().numbers()

    def batch_loss(
        self, network: nn.Module, images: Tensor, targets: Tensor, random: torch.Generator
    ) -> Tensor:
        """The task's loss of images that are normalised by random sites, this one included."""
        entries = list({**self.bank, self.site.name: self.described()}.values())
        drawn = torch.randint(len(entries), (len(images),), generator=random)
        numbers = {}
        for name in ("mean", "deviation"):
            of_sites = torch.stack([entry[name] for entry in entries])
            numbers[name] = of_sites[drawn].to(images)
        return self.site.loss(network(normalised(images, **numbers)), targets)


# The builder of final models of kind "channel_normalised".
channel_normalised_model = partial(prepared_model, change=normalised)


# -- CCST ------------------------------------------------------------------------------------------


@strict_dataclass
class CCSTHyper(BankHyper):
    """The styles."""

    mode: Literal["overall", "single"] = param(
        "overall", "one style of all images of a site, or styles of single images", source="Sec. 3"
    )
    styles: int = param(
        3,
        "styles of each image, of different sites",
        symbol="K",
        source="README of the code",
        low=1,
    )
    images: int = param(16, "single styles that a site shares", symbol="J", low=1, high=2000)


def _styles(plan: Plan) -> StateDict:
    hyper = plan.site_hyper
    return _statistics(plan, hyper.images if hyper.mode == "single" else 1)


class CCSTSite(BankSite[CCSTHyper]):
    """CCST (Chen et al., WACV 2023): training images also in the styles of other sites.

    Each image gets K styles of different sites; that of its site leaves it as it is. Published:
    AdaIN of the features of a pretrained VGG network, with a pretrained decoder, once before
    training. Here AdaIN changes the images themselves, so that a style is brightness and contrast
    by channel, without texture; and the sites are drawn for every batch. With `minimum_patients` a
    single style is the mean of a group of patients, see `group_means`.
    """

    entry = TensorSpec(
        "survey",
        "brightness and contrast by channel of all training images, or of some of them, "
        "which all sites receive",
        _styles,
        measured="train",
    )

    def described(self) -> StateDict:
        if self.hyper.mode == "overall":
            means, deviations = _statistics_of_site(self)
            mean = means.mean(dim=0)
            square = (deviations.square() + (means - mean).square()).mean(dim=0)
            return {"mean": mean[None], "deviation": square.sqrt()[None]}
        styles = self.group_means(self.hyper.images, stacked_statistics)
        mean, deviation = styles.unbind(dim=1)
        return {"mean": mean, "deviation": deviation}

    def batch_loss(
        self, network: nn.Module, images: Tensor, targets: Tensor, random: torch.Generator
    ) -> Tensor:
        """The mean of the task's losses of all K versions of the images."""
        names = sorted({*self.bank, self.site.name})
        order = torch.rand(len(images), len(names), generator=random).argsort(dim=1)
        losses = []
        for drawn in order[:, : self.hyper.styles].unbind(dim=1):
            versions = self.styled(images, [names[index] for index in drawn.tolist()], random)
            losses.append(self.site.loss(network(versions), targets))
        return torch.stack(losses).mean()

    def styled(self, images: Tensor, sites: list[str], random: torch.Generator) -> Tensor:
        """Each image in a style of the site that is drawn for it."""
        versions = images.clone()
        for name in sorted(set(sites) - {self.site.name}):
            rows = [row for row, drawn in enumerate(sites) if drawn == name]
            mean, deviation = self.bank[name]["mean"], self.bank[name]["deviation"]
            style = torch.randint(len(mean), (len(rows),), generator=random)
            versions[rows] = adain(
                images[rows], mean[style].to(images), deviation[style].to(images)
            )
        return versions
