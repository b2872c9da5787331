"""The aggregators in the hands of FLARE's own workflows: accept models in any order, aggregate, hand out the parts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from flare.server import Server
from medflare.core.errors import UpdateError
from medflare.flare.aggregators import (
    MethodAggregator,
    OwnPartFilter,
    SoftPullAggregator,
    WeightedAggregator,
    own_part,
)


def sent(site: str, params: dict[str, Any], samples: int = 1, **metrics: float) -> FLModel:
    meta = {"client_name": site, FLMetaKey.NUM_STEPS_CURRENT_ROUND: samples}
    return FLModel(params=params, params_type=ParamsType.FULL, metrics=metrics or None, meta=meta)


def aggregated(aggregator: MethodAggregator, *models: FLModel) -> FLModel:
    for model in models:
        aggregator.accept_model(model)
    return aggregator.aggregate_model()


def test_weighted_mean_by_samples_whatever_the_order() -> None:
    models = [
        sent(f"site-{k}", {"w": torch.tensor([0.1 * k, 1.0])}, samples=k, dice=0.1 * k)
        for k in (1, 2, 3)
    ]
    forward = aggregated(WeightedAggregator(), *models)
    backward = aggregated(WeightedAggregator(), *models[::-1])
    expected = torch.tensor([(0.1 * 1 + 0.2 * 2 + 0.3 * 3) / 6, 1.0])
    assert torch.allclose(forward.params["w"], expected, atol=1e-7)
    assert torch.equal(forward.params["w"], backward.params["w"])
    assert forward.metrics["dice"] == pytest.approx((0.1 + 0.4 + 0.9) / 6)


def test_rounds_do_not_mix() -> None:
    aggregator = WeightedAggregator()
    aggregated(aggregator, sent("a", {"w": torch.zeros(1)}), sent("b", {"w": torch.zeros(1)}))
    assert aggregated(aggregator, sent("a", {"w": torch.ones(1)})).params["w"].item() == 1.0


def test_clients_that_speak_numpy_get_numpy_back() -> None:
    result = aggregated(
        WeightedAggregator(),
        sent("a", {"w": np.array([1.0, 3.0])}),
        sent("b", {"w": np.array([3.0, 5.0])}),
    )
    assert isinstance(result.params["w"], np.ndarray)
    assert result.params["w"].tolist() == [2.0, 4.0]


def test_soft_pull_gives_every_site_its_own_part_and_newcomers_the_mean() -> None:
    models = [sent(f"site-{k}", {"w": torch.tensor([float(k)])}, samples=k) for k in (1, 2, 3)]
    joined = aggregated(SoftPullAggregator({"lam": 0.7}), *models).params
    pulled = {
        site: own_part(joined, site)["w"].item()
        for site in ("site-1", "site-2", "site-3", "site-9")
    }
    assert pulled == pytest.approx(
        {"site-1": 0.7 + 0.15 * 5, "site-2": 2.0, "site-3": 2.1 + 0.15 * 3, "site-9": 14 / 6}
    )


def test_bad_models_are_refused_by_name() -> None:
    difference = sent("CS", {"w": torch.zeros(1)})
    difference.params_type = ParamsType.DIFF
    with pytest.raises(UpdateError, match=r"CS sent .*DIFF"):
        WeightedAggregator().accept_model(difference)
    with pytest.raises(UpdateError, match="without the name of its site"):
        WeightedAggregator().accept_model(FLModel(params={"w": torch.zeros(1)}))
    for bad in (torch.tensor([1.0, torch.nan]), np.array([np.inf])):
        with pytest.raises(
            UpdateError, match="CS sent w with NaN or infinite values; its model is not used"
        ):
            WeightedAggregator().accept_model(sent("CS", {"a": torch.zeros(1), "w": bad}))


def test_in_scatter_and_gather_a_bad_model_costs_nobody_elses(tmp_path: Path) -> None:
    """FLARE ends a task for all sites where the aggregator raises."""
    aggregator = WeightedAggregator()
    shareables = [
        FLModelUtils.to_shareable(sent(site, {"w": np.array([value])}))
        for site, value in (("CS", np.nan), ("DU", 1.0))
    ]
    fl_ctx = Server(tmp_path, aggregator).context()
    assert [aggregator.accept(shareable, fl_ctx) for shareable in shareables] == [False, True]
    assert np.asarray(aggregator.aggregate_model().params["w"]).tolist() == [1.0]


def test_metrics_without_samples_are_averaged_plainly() -> None:
    models = [
        sent(site, {"w": torch.ones(2)}, samples=0, loss=loss)
        for site, loss in (("A", 0.1), ("B", 0.3))
    ]
    assert aggregated(MethodAggregator(method="robust"), *models).metrics == {
        "loss": pytest.approx(0.2)
    }


def test_filter_hands_out_the_receivers_part() -> None:
    joined = aggregated(
        SoftPullAggregator({"lam": 1.0}),
        sent("CS", {"w": torch.ones(1)}),
        sent("DU", {"w": torch.zeros(1)}),
    ).params

    def received(site: str, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fl_ctx = FLContext()
        peer = FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, site, private=False)
        fl_ctx.set_peer_context(peer)
        shareable = DXO(DataKind.WEIGHTS, params, {"round": 2}).to_shareable()
        dxo = from_shareable(OwnPartFilter().process(shareable, fl_ctx))
        assert dxo.meta == {"round": 2}
        return dxo.data

    assert received("CS", joined) == {"w": torch.ones(1)}
    assert received("DU", joined) == {"w": torch.zeros(1)}
    assert received("FG", joined) == {"w": torch.tensor([0.5])}
    assert list(received("CS", {"w": torch.ones(1)})) == ["w"]
