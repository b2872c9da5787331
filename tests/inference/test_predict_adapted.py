"""`medflare predict --adapt`: every adaptation of every delivered model, with the numbers that the methods' own have."""

from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.final_models import probabilities
from helpers.small_tasks import predicted
from inference.conftest import SEGMENTATION, Models, Runs
from medflare.adaptation.registry import adapted_at, with_adaptation, with_tent
from medflare.core.errors import ConfigError
from medflare.inference.deployed import StoredModel, load_model
from medflare.inference.predict import predict
from medflare.methods.catalogue import build_deployed
from medflare.training.opening import open_site


@pytest.mark.parametrize("tta", ["tent", "dsbn"])
def test_a_requested_adaptation_gives_the_numbers_of_the_method(
    tta: str, trained: Runs, data_root: Path, tmp_path: Path
) -> None:
    stored = load_model(trained("fedavg") / "sites/A/global")
    site = open_site("O", SEGMENTATION, role="outside", data_root=data_root)
    tent = with_tent(stored.message, stored.task)
    message = (
        tent
        if tta == "tent"
        else adapted_at(site, stored.message, "dsbn", partial(build_deployed, stored.task))
    )
    expected = predicted(site, build_deployed(stored.task, message), "test")
    actual = probabilities(stored, data_root / "O/test", tmp_path, adapt=tta)
    assert torch.equal(actual, expected)
    plain = probabilities(stored, data_root / "O/test", tmp_path)
    assert not torch.allclose(actual, plain)
    delivered = StoredModel(
        stored.task, tent if tta == "tent" else with_adaptation(stored.message, "dsbn"), {}
    )
    assert torch.equal(probabilities(delivered, data_root / "O/test", tmp_path), expected), (
        "a model that came with it"
    )
    assert torch.equal(
        probabilities(delivered, data_root / "O/test", tmp_path, adapt=tta), expected
    ), "asking twice changes nothing"
    assert torch.equal(
        probabilities(delivered, data_root / "O/test", tmp_path, adapt="none"), plain
    ), "and without it"


@pytest.mark.parametrize("tta", ["auto", "none", "tent", "dsbn"])
@pytest.mark.parametrize("kind", ["plain", "tent", "dsbn"])
def test_every_adaptation_of_every_delivered_one(
    kind: str, tta: str, untrained: Models, data_root: Path, tmp_path: Path
) -> None:
    plain = load_model(untrained())
    site = open_site("A", SEGMENTATION, data_root=data_root)
    messages = {
        "plain": plain.message,
        "tent": with_tent(plain.message, SEGMENTATION),
        "dsbn": adapted_at(site, plain.message, "dsbn", partial(build_deployed, SEGMENTATION)),
    }
    stored = {name: StoredModel(SEGMENTATION, message, {}) for name, message in messages.items()}
    images = data_root / "O/test"
    as_if = {"auto": (kind, "auto"), "none": ("dsbn" if kind == "dsbn" else "plain", "none")}.get(
        tta, ("plain", tta)
    )
    expected = probabilities(stored[as_if[0]], images, tmp_path, as_if[1])
    assert torch.equal(probabilities(stored[kind], images, tmp_path, tta), expected)
    adapted = predict(
        stored[kind], [images], tmp_path / "out", builder=build_deployed, adapt=tta
    ).adapted
    assert adapted.partition(",")[0] == {"auto": kind.replace("plain", ""), "none": ""}.get(
        tta, tta
    )


@pytest.mark.parametrize("tta", ["tent", "dsbn"])
def test_a_model_that_normalizes_by_the_test_images_has_no_further_adaptation(
    tta: str, routed: StoredModel, data_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="routed"):
        predict(routed, [data_root / "O/test"], tmp_path / "out", builder=build_deployed, adapt=tta)
