from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medflare.core.errors import Aborted, ConfigError, DataError
from medflare.core.rng import seeded
from medflare.data.splits import ENVIRONMENT, SiteData, Split
from medflare.sites.site import Site, open_site
from medflare.tasks.config import TaskConfig, load_task

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


def _split(number: int, task: TaskConfig) -> Split:
    """Image n is filled with n; its mask has n pixels."""
    images = torch.arange(number).float()[:, None, None, None].expand(number, task.channels, *task.size).contiguous()
    pixels = torch.arange(task.size[0] * task.size[1]).view(*task.size)
    targets = torch.stack([(pixels < n).long() for n in range(number)]) if number else torch.zeros(0, *task.size, dtype=torch.long)
    return Split(images, targets, tuple(f"p{n}" for n in range(number)), tuple(f"{n}.png" for n in range(number)))


def _site(task: TaskConfig, train: int = 10, validation: int = 3, test: int = 3, name: str = "A", seed: int = 0) -> Site:
    return Site(name, task, SiteData(_split(train, task), _split(validation, task), _split(test, task), ("a note",)), seed)


def _order(site: Site, *keys: Any, **options: Any) -> list[int]:
    return torch.cat([batch.index for batch in site.batches("train", *keys, **options)]).tolist()


def test_batches_are_a_seeded_permutation(make_task: TaskOf) -> None:
    site = _site(make_task())
    assert sorted(_order(site, 1)) == list(range(10))
    assert _order(site, 1) == _order(site, 1) == _order(_site(make_task()), 1)
    different = [
        _order(site, 2),
        _order(site, 1, "personal"),
        _order(_site(make_task(), name="B"), 1),
        _order(_site(make_task(), seed=1), 1),
    ]
    assert all(order != _order(site, 1) for order in different)
    for batch in site.batches("train", 0):
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
        assert batch.targets.flatten(1).sum(dim=1).tolist() == batch.index.tolist()


def test_batches_do_not_touch_global_randomness(make_task: TaskOf) -> None:
    before = torch.random.get_rng_state()
    list(_site(make_task(augment=[{"name": "RandFlip", "prob": 0.5}])).batches("train", 0))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("images", "size", "drop_last", "expected"),
    [
        (10, 4, False, [4, 4, 2]),
        (9, 4, False, [4, 5]),  # a lone last image joins the batch before it
        (9, 4, True, [4, 4]),
        (8, 4, True, [4, 4]),
        (3, 4, True, [3]),  # the only batch is never dropped
        (1, 4, False, [2]),  # the only image fills a batch twice
        (1, 1, False, [1]),
        (3, 1, False, [1, 1, 1]),
        (0, 4, False, []),
    ],
)
def test_batch_sizes(make_task: TaskOf, images: int, size: int, drop_last: bool, expected: list[int]) -> None:
    site = _site(make_task(), train=images)
    assert [len(batch.images) for batch in site.batches("train", 0, batch_size=size, drop_last=drop_last)] == expected


def test_one_image_trains_a_network_with_batch_norm(make_task: TaskOf) -> None:
    task = make_task("classification", network={"name": "vgg16_slim"}, size=[32, 32])
    one = Split(torch.rand(1, 1, 32, 32), torch.tensor([2]), ("p",), ("x.png",))
    site = Site("A", task, SiteData(one, one, one))
    network = site.network()
    for batch in site.batches("train", 0):
        site.loss(network(batch.images), batch.targets).backward()
    assert site.score(site.predictor(network)).values["accuracy"] in (0.0, 1.0)
    assert site.n == {"train": 1, "validation": 1, "test": 1}


def test_augmentation_is_keyed(make_task: TaskOf) -> None:
    site = _site(make_task(augment=[{"name": "RandGaussianNoise", "prob": 1.0, "std": 0.5}]))

    def images(*keys: Any, augment: bool = True) -> torch.Tensor:
        return torch.cat([batch.images for batch in site.batches("train", *keys, augment=augment)])

    torch.testing.assert_close(images(0), images(0), rtol=0, atol=0)
    assert not torch.equal(images(0), images(1))
    assert images(0, augment=False).unique().numel() == 10
    assert torch.cat([batch.images for batch in site.ordered("train")]).unique().numel() == 10


def test_ordered(make_task: TaskOf) -> None:
    batches = list(_site(make_task()).ordered("train", batch_size=3))
    assert [len(batch.images) for batch in batches] == [3, 3, 3, 1]
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(10))


def test_abort_is_asked_before_every_batch(make_task: TaskOf) -> None:
    site = _site(make_task())
    asked = iter([False, False, True])
    site.abort = lambda: next(asked)
    batches = site.batches("train", 0, batch_size=2)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(Aborted, match="site A"):
        next(batches)
    site.abort = lambda: True
    with pytest.raises(Aborted):
        site.score(lambda images: images)


def test_score_and_predict(make_task: TaskOf) -> None:
    site = _site(make_task(), validation=70)

    def perfect(images: torch.Tensor) -> torch.Tensor:
        pixels = torch.arange(256).view(1, 1, 16, 16)
        return (pixels < images[:, :, :1, :1]).float()

    scores = site.score(perfect)
    assert scores.values == {"dice": 1.0, "iou": 1.0} and scores.left_out == 1  # image 0 has an empty mask
    assert set(site.score(perfect, "test").values) == {"dice", "iou", "hd95"}
    assert set(site.score(perfect, metrics=["hd95"]).values) == {"hd95"}
    assert site.predict(perfect, "validation").shape == (70, 1, 16, 16)
    assert site.score_outputs(site.predict(perfect, "test"), "test").values == site.score(perfect, "test").values


def test_scoring_uses_evaluation_mode_and_restores(make_task: TaskOf) -> None:
    site = _site(make_task(network={"name": "unet", "channels": [4, 8], "norm": "batch"}))
    network = site.network().train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    site.score(site.predictor(network))
    assert all(part.training for part in network.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    frozen = network.eval()
    site.score(site.predictor(frozen))
    assert not any(part.training for part in frozen.modules())


def test_optimizers(make_task: TaskOf) -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    site = _site(make_task(optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}))
    optimizer = site.optimizer(weights)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] == 0.9
    assert site.optimizer(weights, lr=0.5).defaults["lr"] == 0.5
    assert isinstance(_site(make_task()).optimizer(weights), torch.optim.Adam)
    with pytest.raises(ConfigError, match=r"optimizer adam: .*momentun"):
        _site(make_task(optimizer={"name": "adam", "lr": 0.1, "momentun": 0.9})).optimizer(weights)


def test_networks_are_equal_at_all_sites(make_task: TaskOf) -> None:
    first, second = (_site(make_task(), name=name).network().state_dict() for name in ("A", "B"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_site_learns(make_site: SiteOf, make_task: TaskOf) -> None:
    site = open_site("A", make_task(loss={"name": "dice_ce"}, optimizer={"name": "adam", "lr": 0.05}), data_root=make_site())
    network, before = site.network(), None
    optimizer = site.optimizer(network.parameters())
    with seeded(0, "training"):
        for epoch in range(40):
            for batch in site.batches("train", epoch):
                loss = site.loss(network(batch.images), batch.targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                before = before or loss.item()
    assert before is not None and loss.item() < 0.5 * before
    dice = site.score(site.predictor(network)).values["dice"]
    assert dice is not None and dice > 0.8


def test_opening(make_site: SiteOf, make_task: TaskOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    folder, cache = make_site(), tmp_path / "cache"
    site = open_site("A", make_task(), local={"data_root": str(folder), "device": "cpu", "cache": str(cache)}, seed=5)
    assert site.n == {"train": 5, "validation": 2, "test": 3} and site.seed == 5 and site.device.type == "cpu"
    assert list(cache.iterdir())
    other = tmp_path / "other"
    open_site("A", make_task(size=[8, 8]), local={"data_root": str(folder), "cache": False}, cache=other)
    assert not other.exists()
    with pytest.raises(DataError, match="site A: no data root"):
        open_site("A", make_task())
    only_test = make_site({"test": ["x"]}, name="O")
    assert open_site("O", make_task(), data_root=only_test, role="outside").n == {"train": 0, "validation": 0, "test": 1}
    assert open_site("site-1", load_task("phantom")).n["train"] > 30


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"data_root": 3}, "data_root must be str, got 3"),
        ({"device": "gpu"}, "unknown device 'gpu'; use cpu, cuda"),
        ({"cache": 1}, "cache must be str or bool, got 1"),
        ({"batchsize": 4}, "local/medflare.json: unknown setting 'batchsize'; did you mean batch_size"),
        ({"root": "/data"}, "unknown setting 'root'; .*known: batch_size, cache, data_root, device, outbound, privacy"),
        ({"batch_size": 1}, "batch_size must be 2 or more, got 1; batch normalisation"),
        ({"batch_size": "4"}, "batch_size must be 2 or more, got '4'"),
        ({"batch_size": True}, "batch_size must be 2 or more, got True"),
    ],
)
def test_bad_local_settings(make_task: TaskOf, local: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_site("A", make_task(), local=local)


def test_a_small_gpu_bounds_the_batches(make_task: TaskOf, make_site: SiteOf) -> None:
    """Training, passes in order and scoring keep to the site's own limit, and the results say that its batches differ."""
    folder, task = make_site({"training": [f"p{n}" for n in range(10)], "test": ["q", "r"]}), make_task(batch_size=8)
    site = open_site("A", task, data_root=folder, local={"batch_size": 3, "outbound": {"bytes": 10}})
    count = site.n["train"]
    sizes = [len(batch.images) for batch in site.batches("train", 0)]
    assert sum(sizes) == count and max(sizes) <= 4  # a single image that is left over joins three others
    assert max(len(batch.images) for batch in site.batches("train", 0, batch_size=6)) <= 4
    assert {len(batch.images) for batch in site.ordered("train")} <= {1, 2, 3}
    assert site.scoring_batch == site.batch_size == 3
    assert site.notes == ["trains with batches of 3, not the task's 8: its local/medflare.json says so"]
    assert site.task.fingerprint() == task.fingerprint()  # it takes part in the same federation


@pytest.mark.parametrize("local", [{}, {"batch_size": None}, {"batch_size": 8}, {"batch_size": 64}])
def test_no_limit_no_note(make_task: TaskOf, make_site: SiteOf, local: dict[str, Any]) -> None:
    site = open_site("A", make_task(batch_size=8), data_root=make_site(), local=local)
    assert site.batch_size == 8 and site.notes == []


def test_cache_true_is_the_callers_folder(make_task: TaskOf, make_site: SiteOf, tmp_path: Path) -> None:
    open_site("A", make_task(), data_root=make_site(), local={"cache": True}, cache=tmp_path / "cache")
    assert any((tmp_path / "cache").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said(make_task: TaskOf) -> None:
    with pytest.raises(ConfigError, match="device 'cuda' is not available here"):
        open_site("A", make_task(), local={"device": "cuda"})


def test_notes_and_counts(make_task: TaskOf) -> None:
    site = _site(make_task(), train=3)
    assert site.notes == ["a note"]
    assert site.class_counts().tolist() == [3 * 256 - 3, 3]


class TestDrawnPatients:
    def site(self, task: TaskConfig, images: int = 5, patients: int = 8) -> Site:
        """Patient k has the images k, k + 8, k + 16, ...; the last half of the patients has one image less."""
        split = _split(images * patients - patients // 2, task)
        split = Split(split.images, split.targets, tuple(f"p{n % patients}" for n in range(len(split))), split.names)
        return Site("A", task, SiteData(split, split, split), 0)

    def test_each_patient_joins_independently_by_one_image(self, make_task: TaskOf) -> None:
        site = self.site(make_task())
        assert site.training_patients == 8
        drawn = [batch.index % 8 for batch in site.drawn_patients(0.3, 2000, np.random.default_rng(1))]
        assert all(len(set(rows.tolist())) == len(rows) for rows in drawn), "nobody twice"
        sizes = torch.tensor([float(len(rows)) for rows in drawn])
        assert sizes.mean().item() == pytest.approx(8 * 0.3, abs=0.1)
        assert sizes.var().item() == pytest.approx(8 * 0.3 * 0.7, abs=0.2), "a binomial number of them"
        shares = torch.bincount(torch.cat(drawn), minlength=8) / 2000
        assert shares.sub(0.3).abs().max() < 0.05, "patients with fewer images are drawn as often"

    def test_every_image_of_a_patient_has_its_turn(self, make_task: TaskOf) -> None:
        site = self.site(make_task(), images=3, patients=2)
        rows = torch.cat([batch.index for batch in site.drawn_patients(1.0, 600, np.random.default_rng(2))])
        shares = torch.bincount(rows) / 600
        assert shares[:5].tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3], abs=0.07)

    def test_images_go_with_their_masks_and_their_augmentation(self, make_task: TaskOf) -> None:
        site = self.site(make_task(augment=[{"name": "RandFlip", "prob": 0.5, "spatial_axis": 0}]))
        (batch,) = site.drawn_patients(1.0, 1, np.random.default_rng(3))
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
        upright = site.data.train.targets[batch.index]
        flipped = [torch.equal(mask, plain.flip(0)) for mask, plain in zip(batch.targets, upright, strict=True)]
        assert 0 < sum(flipped) < 8
        assert all(flip or torch.equal(mask, plain) for flip, mask, plain in zip(flipped, batch.targets, upright, strict=True))

    def test_nobody_and_an_abort(self, make_task: TaskOf) -> None:
        site = self.site(make_task(augment=[{"name": "RandFlip", "prob": 0.5}]))
        assert [batch.images.shape for batch in site.drawn_patients(0.0, 2, np.random.default_rng())] == [(0, 1, 16, 16)] * 2
        site.abort = lambda: True
        with pytest.raises(Aborted):
            next(site.drawn_patients(0.5, 1, np.random.default_rng()))
