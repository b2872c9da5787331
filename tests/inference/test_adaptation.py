"""Test-time adaptation as a delivered model: what the card says is what is built, whatever kind lies underneath."""

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.inference.batch_statistics import TargetStatistics
from medflare.inference.deployed import load_model, plain_message, save_model
from medflare.inference.tent import Tent
from medflare.methods.catalogue import build_deployed
from medflare.methods.grace.adaptation import AdaptationHyper, adapted_to, check_adaptable, with_adaptation


@pytest.fixture(params=["segmentation", "classification"])
def task(request, squares):
    network = {"unet": squares.SEGMENTATION.network, "resnet18": {"name": "resnet18", "small_images": True}}
    return squares.task(request.param, network=network["unet" if request.param == "segmentation" else "resnet18"])


def test_none_changes_nothing(squares):
    message = plain_message(squares.start())
    assert with_adaptation(message, squares.SEGMENTATION, AdaptationHyper()) is message


@pytest.mark.parametrize(("tta", "kind"), [("dsbn", TargetStatistics), ("tent", Tent)])
def test_stored_built_and_used(squares, task, tta, kind, tmp_path):
    plain = plain_message(squares.start(task))
    hyper = AdaptationHyper(tta=tta, tent_rate=0.02, tent_steps=2, tent_episodic=True)
    save_model(tmp_path, task, with_adaptation(plain, task, hyper), {})
    module = load_model(tmp_path).build(build_deployed)
    assert type(module) is kind
    images = squares.site("O", task).data.test.images
    if tta == "dsbn":
        module.adapt([images])
    else:
        assert (module.rate, module.steps, module.episodic, module.batch_size) == (0.02, 2, True, task.batch_size)
    found, unadapted = module(images), build_deployed(task, plain)(images)
    assert found.shape == unadapted.shape and not torch.allclose(found, unadapted, atol=1e-3)
    assert ((found >= 0) & (found <= 1)).all()


def test_dsbn_is_delivered_with_the_sites_statistics(squares, task, tmp_path):
    plain, site = plain_message(squares.start(task)), squares.site("O", task)
    message = adapted_to(site, plain, AdaptationHyper(tta="dsbn"))
    save_model(tmp_path, task, message, {})
    expected = TargetStatistics(build_deployed(task, plain))
    expected.adapt([site.data.test.images])
    images = site.data.test.images
    torch.testing.assert_close(load_model(tmp_path).build(build_deployed)(images), expected(images))
    assert adapted_to(site, plain, AdaptationHyper(tta="tent")).states.keys() == {"model"}
    assert plain.states.keys() == {"model"}


def test_dsbn_at_a_site_without_test_images_keeps_the_trained_statistics(squares):
    plain = plain_message(squares.start())
    message = adapted_to(squares.site("O", counts=(3, 0, 0)), plain, AdaptationHyper(tta="dsbn"))
    images = squares.site("O").data.test.images
    torch.testing.assert_close(build_deployed(squares.SEGMENTATION, message)(images), build_deployed(squares.SEGMENTATION, plain)(images))


@pytest.mark.parametrize("tta", ["dsbn", "tent"])
def test_network_without_batch_norm_is_refused(squares, tta):
    task = squares.task(network={"name": "unet", "channels": [4, 8], "norm": "instance"})
    with pytest.raises(ConfigError, match=r"no BatchNorm.*none"):
        check_adaptable(task, AdaptationHyper(tta=tta))
    check_adaptable(task, AdaptationHyper())
    check_adaptable(squares.SEGMENTATION, AdaptationHyper(tta=tta))
