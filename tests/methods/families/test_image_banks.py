"""FedRDN, CCST, ELCFS and HarmoFL: their formulas, the bank, degenerate cases, and deployed models."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.federation.suppression import Suppression
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed, get_method
from medflare.methods.families.image_banks.bank import (
    BANK,
    SURVEY,
    BankServer,
    BankSite,
    prepared_message,
)
from medflare.methods.families.image_banks.spectra import (
    ELCFSSite,
    HarmoFLSite,
    amplitude_normalised,
    amplitudes,
    with_amplitude,
)
from medflare.methods.families.image_banks.styles import (
    CCSTSite,
    FedRDNSite,
    adain,
    channel_statistics,
    normalised,
)
from medflare.methods.families.local_terms.fedsam import FedSAMSite
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.fedavg.site import MODEL, received
from medflare.networks.catalogue import task_network
from methods import squares

SITES: list[type[BankSite[Any]]] = [FedRDNSite, CCSTSite, ELCFSSite, HarmoFLSite]


def random_images(*shape: int) -> Tensor:
    return 2 + torch.randn(shape, generator=torch.Generator().manual_seed(3))


def empty(bank_server: Any, _step: Step, _replies: Any) -> None:
    """A server that stores no entries."""


# -- formulas --------------------------------------------------------------------------------------


def test_normalisation_and_adain_by_hand() -> None:
    image = torch.tensor([[[[1.0, 3.0]], [[4.0, 4.0]]]])  # μ = (2, 4), σ = (1, 0)
    mean, deviation = channel_statistics(image)
    assert (mean.tolist(), deviation.tolist()) == ([[2.0, 4.0]], [[1.0, 0.0]])
    other = torch.tensor([0.0, 2.0]), torch.tensor([2.0, 0.0])
    assert normalised(image, *other).flatten().tolist() == [0.5, 1.5, 2.0, 2.0]
    style = torch.tensor([[10.0, 1.0]]), torch.tensor([[3.0, 5.0]])
    assert adain(image, *style).flatten().tolist() == [7.0, 13.0, 1.0, 1.0]


@pytest.mark.parametrize("dims", [2, 3])
def test_adain_gives_each_image_its_style(dims: int) -> None:
    images = random_images(3, 2, *[5] * dims)
    mean = random_images(3, 2)
    deviation = random_images(3, 2).abs()
    of_styled = channel_statistics(adain(images, mean, deviation))
    torch.testing.assert_close(of_styled, (mean, deviation))


@pytest.mark.parametrize("size", [(10, 20), (11, 21)])
def test_amplitude_exchange_is_that_of_the_centred_spectrum(size: tuple[int, int]) -> None:
    """NumPy's full spectrum with its zero frequency in the middle, as in the authors' code."""
    image, other = random_images(2, 1, *size).unbind()
    share = 0.3
    band = amplitudes(other[None], 0.1)
    result = with_amplitude(image[None], band, torch.tensor(share))
    of_image = np.fft.fftshift(np.fft.fft2(image[0].numpy()))
    of_other = np.fft.fftshift(np.fft.fft2(other[0].numpy()))
    rows, columns = (slice(n // 2 - n // 10, n // 2 + n // 10 + 1) for n in size)
    amplitude = np.abs(of_image)
    low = np.abs(of_other)[rows, columns]
    amplitude[rows, columns] = 0.7 * amplitude[rows, columns] + share * low
    expected = np.fft.ifft2(np.fft.ifftshift(amplitude * np.exp(1j * np.angle(of_image))))
    np.testing.assert_allclose(result[0, 0].numpy(), expected.real, atol=1e-5)


@pytest.mark.parametrize("size", [(6, 8), (5, 7), (4, 5, 6)])
@pytest.mark.parametrize("window", [0.0, 0.5])
def test_normalised_images_have_the_amplitude(size: tuple[int, ...], window: float) -> None:
    images = random_images(2, 1, *size)
    amplitude = amplitudes(random_images(1, 1, *size) + 1, window)[0]
    result = amplitude_normalised(images, amplitude)
    expected = amplitude.expand(2, *amplitude.shape)
    torch.testing.assert_close(amplitudes(result, window), expected, rtol=1e-4, atol=1e-4)
    own = with_amplitude(images, amplitudes(images, window), torch.tensor(1.0))
    torch.testing.assert_close(own, images)
    if window == 0.0:  # the mean alone
        changed = (result - images).flatten(1)
        assert changed.std(dim=1).max() < 1e-5 < changed.mean(dim=1).abs().min()


# -- survey and bank -------------------------------------------------------------------------------


def test_surveys_describe_the_training_images() -> None:
    images = squares.site("B").data.train.images
    pixels = images.double().transpose(0, 1).flatten(1)
    overall = squares.algorithm(CCSTSite, "B").described()
    torch.testing.assert_close(overall["mean"][0].double(), pixels.mean(dim=1))
    torch.testing.assert_close(overall["deviation"][0].double(), pixels.std(dim=1, correction=0))
    mean, deviation = channel_statistics(images)
    statistics = squares.algorithm(FedRDNSite, "B").described()
    torch.testing.assert_close(statistics["mean"], mean.mean(dim=0))
    torch.testing.assert_close(statistics["deviation"], deviation.mean(dim=0))
    amplitude = squares.algorithm(HarmoFLSite, "B").described()["amplitude"]
    expected = torch.fft.rfftn(images, dim=(2, 3)).abs().mean(dim=0)
    torch.testing.assert_close(amplitude, expected, rtol=1e-4, atol=1e-4)


def test_single_styles_are_of_images_or_of_enough_patients() -> None:
    one = squares.algorithm(CCSTSite, mode="single", images=5)
    mean, _ = channel_statistics(one.site.data.train.images)
    shared = one.described()["mean"]
    assert shared.shape == (5, 1) and torch.isin(shared, mean).all()
    one.site.minimum_patients = 12  # all patients of the site
    torch.testing.assert_close(one.described()["mean"], mean.mean(dim=0).expand(5, 1))


@pytest.mark.parametrize(
    ("cls", "hyper"), [(CCSTSite, {"mode": "single", "images": 40}), (ELCFSSite, {"images": 40})]
)
def test_groups_share_no_patient_and_are_those_of_every_job(
    cls: type[BankSite[Any]], hyper: dict[str, Any]
) -> None:
    """From overlapping groups of known patients a lead solved each patient's own values."""
    one = squares.algorithm(cls, **hyper)
    one.site.minimum_patients = 5
    sent = one.described()
    images = one.site.data.train.images
    order = sorted(range(12), key=lambda row: one.site.data.train.patients[row])
    for name, values in sent.items():
        groups = values.unique(dim=0)
        assert len(values) == 40 and len(groups) == 2  # of 5 and 7 patients
        rows = order[:5], order[5:]
        for group, value in zip(rows, values[:2], strict=True):
            torch.testing.assert_close(value, each_of(cls, images[group])[name].mean(dim=0))
    other = squares.algorithm(cls, **{**hyper, "images": 1})
    other.site.minimum_patients = 5
    other.site.seed = 99
    for name, values in other.described().items():
        assert torch.equal(values, sent[name][:1])


def each_of(cls: type[BankSite[Any]], images: Tensor) -> dict[str, Tensor]:
    """Entry -> the values of every image."""
    if cls is ELCFSSite:
        return {"amplitude": amplitudes(images, 0.1)}
    mean, deviation = channel_statistics(images)
    return {"mean": mean, "deviation": deviation}


def test_a_patient_counts_once_whatever_its_images() -> None:
    one = squares.algorithm(CCSTSite, mode="single", images=1)
    train = one.site.data.train
    patients = ("p0", *["p1"] * 11)
    one.site.data = replace(one.site.data, train=replace(train, patients=patients))
    one.site.minimum_patients = 2
    mean, _ = channel_statistics(train.images)
    expected = (mean[:1] + mean[1:].mean(dim=0)) / 2
    torch.testing.assert_close(one.described()["mean"], expected)


@pytest.mark.parametrize("cls", SITES)
def test_the_bank_is_asked_once_and_sent_with_every_model(cls: type[BankSite[Any]]) -> None:
    """C is late: it trains with the bank, and is not in it."""
    played = squares.federation(
        cls, BankServer, absent=lambda step, site: site == "C" and not step.round
    )
    assert [turn.step.phase for turn in played.log] == ["survey", "train", "train", "validate"]
    surveyed = {site: reply[SURVEY] for site, reply in played.log[0].replies.items()}
    assert set(surveyed) == {"A", "B"}
    bank = played.log[2].outgoing["C"].family(BANK)
    if cls is HarmoFLSite:
        mean = (surveyed["A"]["amplitude"] + surveyed["B"]["amplitude"]) / 2
        torch.testing.assert_close(bank, {"mean": {"amplitude": mean}})
    else:
        for site in ("A", "B"):
            assert squares.equal(bank[site], surveyed[site])
        assert len(bank) == 2
    assert played.server.configure_final("O").family(BANK).keys() == bank.keys()


def test_zeros_are_no_entry() -> None:
    server = squares.server(BankServer, algorithms=squares.algorithms(CCSTSite))
    one = squares.algorithm(CCSTSite, "A")
    reply = one.perform("survey", 0, Message())
    one.site.minimum_patients = 13
    hidden = Suppression(one.site).suppressed(reply, one.phase("survey"), one.plan)
    assert not hidden[SURVEY]["mean"].any()
    server.aggregate(Step.of(BankSite.survey, 0), {"A": hidden, "B": reply})
    assert list(server.configure(Step("train", 0), "A").family(BANK)) == ["B"]
    assert [event["site"] for event in server.context.events.of("warning")] == ["A"]


def test_only_its_server_has_a_bank() -> None:
    for pair in (get_method("fedrdn", server="fedavg"), get_method("fedavg", server="ccst")):
        with pytest.raises(ConfigError, match=r"works only with its (server|site) algorithm"):
            pair.check({})


# -- degenerate cases ------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [CCSTSite, ELCFSSite])
@pytest.mark.parametrize("kind", ["SEGMENTATION", "CLASSIFICATION_WITH_BATCH_NORM"])
def test_without_a_bank_it_is_fedavg(monkeypatch: pytest.MonkeyPatch, cls: Any, kind: str) -> None:
    monkeypatch.setattr(BankServer, "collect", empty)
    task = getattr(squares, kind)
    played = squares.federation(cls, BankServer, task)
    assert squares.equal(played.model, squares.run("fedavg", task).model)


def test_harmofl_without_a_bank_is_fedsam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BankServer, "collect", empty)
    played = squares.run("harmofl")
    assert squares.equal(played.model, squares.run("fedsam").model)


def test_fedrdn_with_one_set_of_statistics_is_fedavg_of_normalised_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def same(_: Any) -> dict[str, Tensor]:
        return {"mean": torch.tensor([0.5]), "deviation": torch.tensor([2.0])}

    monkeypatch.setattr(FedRDNSite, "described", same)
    played = squares.run("fedrdn")
    members = squares.algorithms(FedAvgSite)
    for member in members.values():
        data = member.site.data
        splits = {}
        for name in ("train", "validation", "test"):
            split = data.split(name)
            splits[name] = replace(split, images=(split.images - 0.5) / 2.0)
        member.site.data = replace(data, **splits)
    server = squares.server(FedAvgServer, rounds=2, outside=(), algorithms=members)
    expected = squares.play(server, members)
    assert squares.equal(played.model, expected.model)
    last = played.log[-1].replies["A"]
    of_fedavg = expected.log[-1].replies["A"]
    assert last.meta["validation"] == of_fedavg.meta["validation"]


# -- what training sees ----------------------------------------------------------------------------


class Seen(torch.nn.Module):
    """A network that records its images."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.images: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.images.append(images)
        return images * self.scale.reshape(1, 1, 1, 1)


def seen(one: Any, bank: dict[str, Any], seed: int = 0) -> list[Tensor]:
    """The images that a network gets for the batch of the first training images."""
    network = Seen()
    data = one.site.data.train
    one.bank = bank
    random = torch.Generator().manual_seed(seed)
    loss = one.batch_loss(network, data.images, data.targets, random)
    loss.backward()
    assert network.scale.grad is not None and network.scale.grad.isfinite().all()
    return network.images


def surveys(cls: type[BankSite[Any]]) -> dict[str, Any]:
    return {site: one.described() for site, one in squares.algorithms(cls).items()}


def test_fedrdn_draws_a_site_for_each_image() -> None:
    bank = surveys(FedRDNSite)
    one = squares.algorithm(FedRDNSite, "A")
    (images,) = seen(one, bank)
    drawn = set()
    for image, original in zip(images, one.site.data.train.images, strict=True):
        of_sites = {site: normalised(original[None], **entry)[0] for site, entry in bank.items()}
        matching = [site for site, other in of_sites.items() if torch.allclose(image, other)]
        assert len(matching) == 1
        drawn.update(matching)
    assert drawn == {"A", "B", "C"}
    (late,) = seen(one, {})
    assert torch.equal(late, normalised(one.site.data.train.images, **bank["A"]))


@pytest.mark.parametrize("mode", ["overall", "single"])
def test_ccst_takes_different_sites_and_leaves_its_style(mode: str) -> None:
    members = squares.algorithms(CCSTSite, mode=mode, images=4)
    bank = {site: one.described() for site, one in members.items()}
    versions = torch.stack(seen(members["A"], bank), dim=1)  # (N, K, C, H, W)
    assert versions.shape[1] == 3
    for original, three in zip(members["A"].site.data.train.images, versions, strict=True):
        mean, _ = channel_statistics(three)
        assert sum(torch.equal(version, original) for version in three) == 1
        for site in ("B", "C"):
            assert torch.isclose(mean, bank[site]["mean"].T, atol=1e-5).any(dim=1).sum() == 1


def test_elcfs_trains_an_episode() -> None:
    """Other sites' amplitudes in the low band alone; the fast weights are a constant step away."""
    bank = surveys(ELCFSSite)
    one = squares.algorithm(ELCFSSite, "A", step=0.5)
    raw, exchanged = seen(one, bank)
    assert torch.equal(raw, one.site.data.train.images)
    size = raw.shape[2:]
    change = (torch.fft.fft2(exchanged) - torch.fft.fft2(raw)).abs()
    k = [(torch.fft.fftfreq(n) * n).abs() <= math.floor(0.1 * n) for n in size]
    low = k[0][:, None] & k[1]
    assert change[..., ~low].max() < 1e-3 < change[..., low].max()
    network = Seen()
    data = one.site.data.train
    random = torch.Generator().manual_seed(0)
    total = one.batch_loss(network, data.images, data.targets, random)
    first = one.site.loss(raw * network.scale.reshape(1, 1, 1, 1), data.targets)
    (gradient,) = torch.autograd.grad(first, network.scale)
    fast = (network.scale - 0.5 * gradient).detach().requires_grad_()
    second = one.site.loss(exchanged * fast.reshape(1, 1, 1, 1), data.targets)
    torch.testing.assert_close(total, first + second)
    total.backward()
    (of_fast,) = torch.autograd.grad(second, fast)
    torch.testing.assert_close(network.scale.grad, gradient + of_fast)


@pytest.mark.parametrize("cls", SITES)
def test_the_bank_moves_the_model_and_draws_are_keyed(
    cls: type[BankSite[Any]], tmp_path: Any
) -> None:
    played = squares.federation(cls, BankServer)
    again = squares.federation(cls, BankServer, store=tmp_path)
    assert squares.equal(played.model, again.model)
    for other in (FedAvgSite, FedSAMSite):
        assert not squares.equal(played.model, squares.federation(other, FedAvgServer).model)


# -- deployed models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "kind"), [(FedRDNSite, "channel_normalised"), (HarmoFLSite, "amplitude_normalised")]
)
def test_deployed_models_change_their_images(cls: type[BankSite[Any]], kind: str) -> None:
    played = squares.federation(cls, BankServer, outside=("O",), rounds=1)
    task = squares.SEGMENTATION
    server = played.server
    images = squares.site("O").data.test.images
    network = task_network(task)
    network.load_state_dict(server.configure_final("O")[MODEL])
    network.eval()
    described = {site: one.described() for site, one in played.algorithms.items()}
    mean = {}
    for name in described["A"]:
        mean[name] = sum(entry[name] for entry in described.values()) / 3
    outside = squares.algorithm(cls, "O")
    numbers = {"A": described["A"] if cls is FedRDNSite else mean, "O": mean}
    for site, one in {"A": played.algorithms["A"], "O": outside}.items():
        final = one.finalize(server.configure_final(site))
        assert {model.meta["kind"] for model in final.values()} == {kind}
        change = normalised if cls is FedRDNSite else amplitude_normalised
        with torch.no_grad():
            expected = task.probabilities(network(change(images, **numbers[site])))
            result = build_deployed(task, final["deployed"])(images)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    (stored,) = server.models().values()
    assert stored.meta["kind"] == kind
    with torch.no_grad():
        torch.testing.assert_close(build_deployed(task, stored)(images), result)
    value = played.log[-1].replies["A"].meta["validation"]["global"]
    module = build_deployed(
        task, played.algorithms["A"].finalize(server.configure_final("A"))["global"]
    )
    scores = played.algorithms["A"].site.score(module, "validation", [task.metric])
    assert scores.values[task.metric] == pytest.approx(value)


def test_without_a_bank_an_outside_site_gets_the_plain_model() -> None:
    server = squares.server(BankServer, algorithms=squares.algorithms(FedRDNSite))
    incoming = server.configure_final("O")
    final = squares.algorithm(FedRDNSite, "O").finalize(incoming)
    assert final["deployed"].meta == received(incoming).meta
    assert prepared_message(Message(), "plain", {"mean": torch.ones(1)}) == Message()
