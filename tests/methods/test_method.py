"""A method as one object: its names are checked, its algorithms loaded when needed, algorithms of two methods paired."""

from typing import Any

import pytest

import medflare.methods
from medflare.core.errors import ConfigError
from medflare.methods.base import ServerContext
from medflare.methods.catalogue import get_method
from medflare.methods.families.local_terms.moon import MoonSite
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import FedAvgHyper
from medflare.methods.grace.server import GraceServer
from medflare.methods.method import Method, loaded, paired
from methods import squares


def made(**changes: Any) -> Method:
    """A method of FedAvg's algorithms."""
    return Method(
        **{
            "name": "mine",
            "title": "Mine",
            "paper": "none",
            "site": FedAvgSite,
            "server": FedAvgServer,
            **changes,
        }
    )


class TestCheck:
    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"weighting": "uniform"},
            {"server.weighting": "uniform"},
            {"server": {"weighting": "uniform"}, "reset_optimizer": "true"},
        ],
    )
    def test_names_of_either_algorithm_in_any_spelling(self, values: dict[str, Any]) -> None:
        made().check(values)
        made().check(values, squares.SEGMENTATION)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"weigthing": "uniform"}, "method mine: unknown hyper-parameter 'weigthing'"),
            (
                {"site.weighting": "uniform"},
                "method mine: unknown hyper-parameter 'site.weighting'",
            ),
            ({"server": {"nonsense": 1}}, "method mine: unknown hyper-parameter 'server.nonsense'"),
            ({"weighting": "mean"}, "method mine, server algorithm: weighting"),
            ({"reset_optimizer": 3}, "method mine, site algorithm: reset_optimizer"),
        ],
    )
    def test_the_first_invalid_value_is_named_with_its_algorithm(
        self, values: dict[str, Any], words: str
    ) -> None:
        for ask in (
            made().check,
            made().effective,
            lambda values: made().plan(squares.SEGMENTATION, squares.SITES, values),
        ):
            with pytest.raises(ConfigError) as caught:
                ask(values)
            assert str(caught.value).startswith(words) and "\n" not in str(caught.value)

    def test_a_name_of_both_algorithms_needs_its_prefix(self) -> None:
        pair = get_method("grace", server="sha")
        with pytest.raises(ConfigError, match="beta"):
            pair.check({"beta": 2.0})
        owned = pair.effective({"site.beta": 2.0, "server": {"beta": 3.0}})
        assert (owned["site"]["beta"], owned["server"]["beta"]) == (2.0, 3.0)


def test_effective_values_are_the_given_ones_and_the_defaults_of_others() -> None:
    method = get_method("grace")
    effective = method.effective({"swap": "false", "beta": "2.0"})
    assert (effective["site"]["swap"], effective["site"]["beta"]) == (False, 2.0)
    assert method.effective(effective) == effective
    assert made().effective({"weighting": "uniform"}) == {
        "server": {"rule": "mean", "selection": "median", "weighting": "uniform"},
        "site": {"dp_clip": 1.0, "dp_delta": 1e-5, "dp_noise": 0.0, "reset_optimizer": False},
    }


def test_plan_and_algorithms_are_built_from_it() -> None:
    method = made()
    plan = method.plan(
        squares.SEGMENTATION, squares.SITES, {"weighting": "uniform", "reset_optimizer": True}
    )
    assert plan.site_hyper == FedAvgHyper(
        reset_optimizer=True
    ) and plan.server_hyper == FedAvgServerHyper(weighting="uniform")
    algorithm = method.make_site(squares.site(), plan)
    server = method.make_server(ServerContext(plan, squares.SEED, 2))
    assert type(algorithm) is FedAvgSite and algorithm.hyper is plan.site_hyper
    assert (
        type(server) is FedAvgServer
        and server.hyper.weighting == "uniform"
        and server.aggregation.rounds == 2
    )


def test_algorithms_by_name_are_loaded_when_they_are_used() -> None:
    lazy = made(site="medflare.methods.fedavg.site:FedAvgSite", server="nowhere.at.all:Server")
    assert lazy.name == "mine" and lazy.algorithms == ("mine", "mine")
    with pytest.raises(ConfigError, match="nowhere"):
        lazy.check({})


class TestPaired:
    def test_each_algorithm_keeps_what_it_has(self) -> None:
        moon = get_method("moon")
        grace = get_method("grace")
        assert paired(moon, moon) is moon
        pair = paired(moon, grace)
        assert (pair.name, pair.algorithms) == ("moon+grace", ("moon", "grace"))
        assert (pair.site_class, pair.server_class) == (MoonSite, GraceServer)
        assert pair.hyper_classes == {"site": MoonSite.Hyper, "server": GraceServer.Hyper}
        assert paired(pair, get_method("robust")).algorithms == ("moon", "robust"), (
            "a pair can be paired again"
        )
        assert (
            paired(get_method("iop_fl"), get_method("fedsm")).models.keys()
            >= get_method("fedsm").models.keys()
        )

    @pytest.mark.parametrize(
        ("site", "server", "offender"),
        [
            ("prr", "fedavg", "prr"),
            ("fedavg", "prr", "prr"),
            ("fedavg", "fedsm", "fedsm"),
            ("fedavg", "iop_fl", "iop_fl"),
        ],
    )
    def test_algorithms_that_need_their_own_counterpart_are_refused(
        self, site: str, server: str, offender: str
    ) -> None:
        pair = paired(get_method(site), get_method(server))
        for ask in (
            pair.check,
            lambda values: pair.plan(squares.SEGMENTATION, squares.SITES, values),
        ):
            with pytest.raises(ConfigError, match=offender):
                ask({})
        assert pair.effective({})["site"] == get_method(site).effective({})["site"], (
            "values can be shown nevertheless"
        )


@pytest.mark.parametrize(
    "target", ["torch.nn:Linea", "torch.nnn:Linear", "torch.nn.Linear", "torch:"]
)
def test_invalid_names_of_algorithms(target: str) -> None:
    with pytest.raises(ConfigError, match="module:name"):
        loaded(target)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"site": FedAvgServer}, "'mine': site=FedAvgServer is no SiteAlgorithm"),
        ({"server": FedAvgSite}, "'mine': server=FedAvgSite is no ServerAlgorithm"),
        ({"site": "math:pi"}, "'mine': site=3.1.* is no SiteAlgorithm"),
    ],
)
def test_what_is_no_algorithm_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made(**changes).check({})


def test_capabilities_are_inherited_and_needed_of_both_algorithms() -> None:
    class Mine(FedAvgSite[Any]):
        pass

    class Own(Mine):
        accumulates = False
        freezes = False

    class Server(FedAvgServer[Any]):
        pass

    frozen = squares.task(freeze=["body"])
    accumulated = squares.task(accumulate=2)
    for task in (frozen, accumulated):
        made(site=Mine, server=Server).check({}, task)
        with pytest.raises(ConfigError):
            made(site=Own).check({}, task)
    with pytest.raises(ConfigError, match="freeze"):
        made(server=get_method("sha").server_class).check({}, frozen)


def test_an_author_finds_everything_in_one_place() -> None:
    assert 40 < len(medflare.methods.__all__) <= 80
    for name in medflare.methods.__all__:
        assert getattr(medflare.methods, name) is not None
