"""The whole catalogue by one set of tests, which a method joins by existing; methods of other distributions; algorithms in pairs."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

import medflare
from foreign.install import METHOD as FOREIGN
from foreign.install import describe, install
from helpers.killed_runs import in_pieces
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.core.hyper import ALGORITHMS, described
from medflare.core.message import Message
from medflare.evaluation.results import validate_results
from medflare.federation.exchange import Reply
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.local.loop import resume_local, run_local
from medflare.federation.preflight import check_run
from medflare.federation.protocol import request_problem
from medflare.federation.settings import PHASES_OF_ALL, RUN_SETTINGS
from medflare.inference.deployed import load_model, save_model
from medflare.methods import catalogue
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed, get_method, method_names, module_of
from medflare.tasks.config import load_task
from methods.squares import Turn

TASK = load_task(
    {
        **load_task("phantom_grades").to_dict(),
        "size": [16, 16],
        "network": {"name": "small_cnn", "channels": [4, 8], "batch_norm": True},
        "batch_size": 32,
    }
)
SITES, OUTSIDE = ("a", "b"), "z"
# Where the paper's number of steps would take a test too long.
SHORTER = {"fedsm_extra": {"selector_rounds": 2}}


def run(name: str, folder: Path | None = None, **more: Any) -> dict[str, Any]:
    """Two rounds of two sites, for the sake of a third."""
    outside = [OUTSIDE] if get_method(name).outside else []
    options = {
        "rounds": 2,
        "seed": 1,
        "outside": outside,
        "out": folder,
        **SHORTER.get(name, {}),
        **more,
    }
    return run_local(name, TASK, SITES, **options)


class Finished(NamedTuple):
    """A run of a method from beginning to end."""

    name: str
    folder: Path
    results: dict[str, Any]
    turns: list[Turn]


def copied(messages: dict[str, Message]) -> dict[str, Message]:
    """The messages as they are now: both sides add meta to those that they hold."""
    return {
        site: Message(dict(message.states), dict(message.meta))
        for site, message in messages.items()
    }


@pytest.fixture(scope="module", params=method_names())
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of every method, looked at by several tests."""
    turns: list[Turn] = []
    call = LocalExchange.__call__

    def noted(
        exchange: LocalExchange, step: Step, outgoing: dict[str, Message]
    ) -> dict[str, Reply]:
        sent = copied(outgoing)
        replies = call(exchange, step, outgoing)
        assert all(reply.message is not None for reply in replies.values()), replies
        turns.append(
            Turn(
                step,
                sent,
                copied(
                    {
                        site: reply.message
                        for site, reply in replies.items()
                        if reply.message is not None
                    }
                ),
            )
        )
        return replies

    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExchange, "__call__", noted)
        results = run(request.param, folder)
    return Finished(request.param, folder, results, turns)


def weights(folder: Path) -> dict[Path, dict[str, Any]]:
    """Every delivered model of a run."""
    return {
        path.relative_to(folder): load_file(path)
        for path in sorted(folder.rglob("model.safetensors"))
    }


class TestEveryMethod:
    def test_runs_and_writes_valid_results(self, finished: Finished) -> None:
        results = finished.results
        validate_results(results)
        assert results["status"] == "COMPLETED", results["reason"]
        outside = {"z": "outside"} if get_method(finished.name).outside else {}
        assert {name: site["role"] for name, site in results["sites"].items()} == {
            "a": "inside",
            "b": "inside",
            **outside,
        }
        assert all(
            site["metrics"]["deployed"][TASK.metric] is not None
            for site in results["sites"].values()
        )

    def test_delivered_models_can_be_built(self, finished: Finished) -> None:
        cards = sorted(finished.folder.rglob("card.json"))
        sites = {
            card.parent.relative_to(finished.folder / "sites").parts[0]
            for card in cards
            if "sites" in card.parts
        }
        assert sites == finished.results["sites"].keys()
        for card in cards:
            load_model(card.parent).build(build_deployed)

    def test_sends_only_what_it_declares(self, finished: Finished) -> None:
        method = get_method(finished.name)
        plan = method.plan(TASK, SITES, SHORTER.get(finished.name, {}))
        steps = [turn for turn in finished.turns if turn.step.phase not in PHASES_OF_ALL]
        assert steps
        for step, outgoing, replies in steps:
            phase = method.site_class.phase(step.phase)
            for site, message in outgoing.items():
                assert message.meta.pop("step") >= 0 and message.meta.pop("run_rounds") == 2
                assert request_problem(phase, plan, message) is None, (step, site)
            for site, reply in replies.items():
                assert phase.undeclared(reply, plan) is None, (step, site)

    def test_is_resumed_after_every_step_with_the_same_weights(
        self, finished: Finished, tmp_path: Path
    ) -> None:
        """Killed within every step but the first."""
        results, killed = in_pieces(
            lambda say: run(finished.name, tmp_path, say=say),
            lambda say: resume_local(tmp_path, say=say),
        )
        steps = sum(turn.step.phase not in PHASES_OF_ALL for turn in finished.turns)
        assert results["status"] == "COMPLETED" and killed == steps - 1
        whole, pieced = weights(finished.folder), weights(tmp_path)
        assert whole.keys() == pieced.keys()
        for path, tensors in whole.items():
            assert tensors.keys() == pieced[path].keys() and all(
                tensors[name].equal(pieced[path][name]) for name in tensors
            ), path


def test_all_methods_but_prr_keep_the_optimizers_moments_by_default() -> None:
    """They stay at the site, as in training alone; PRR alone has no choice, and starts every round afresh."""
    rules = {
        name: get_method(name).effective({})["site"].get("reset_optimizer")
        for name in method_names()
        if name != FOREIGN
    }
    assert {name: rule for name, rule in rules.items() if rule is not False} == {"prr": None}


@pytest.mark.parametrize("name", method_names())
def test_hyper_parameters_are_described_and_no_settings_of_a_run(name: str) -> None:
    """One that shared its name with an argument of `run_local` would be swallowed by it."""
    taken, method = (
        {*RUN_SETTINGS, *inspect.signature(run_local).parameters, *ALGORITHMS},
        get_method(name),
    )
    for algorithm, owner in method.hyper_classes.items():
        assert not taken & described(owner).keys(), algorithm
        assert [about.name for about in described(owner).values() if not about.text] == []


@pytest.mark.parametrize("name", method_names())
def test_every_entry_that_leaves_a_site_has_a_purpose(name: str) -> None:
    method = get_method(name)
    plan = method.plan(TASK, SITES, {})
    for phase in method.site_class.phases.values():
        assert all(
            spec.purpose for spec in method.site_class.manifest(phase.name, plan).values()
        ), phase.name


def test_methods_in_packages_are_listed_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from medflare.methods.catalogue import get_method, method_names\n"
        "methods = [get_method(name) for name in method_names()]\n"
        "assert len(methods) > 6 and all(method.title and method.paper for method in methods)\n"
        "assert not {'torch', 'monai', 'nvflare'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"PYTHONPATH": str(Path(medflare.__file__).parents[1]), "PATH": ""},
    )


@pytest.mark.parametrize("wrong", ["fedrpox", "FedProx"])
def test_an_unknown_name_is_refused_with_the_nearest(wrong: str) -> None:
    with pytest.raises(ConfigError, match="fedprox"):
        get_method(wrong)
    with pytest.raises(ConfigError, match=wrong):
        get_method("fedavg", server=wrong)


# ---- pairs of algorithms -----------------------------------------------------------------------------------------------------


def test_every_pair_of_algorithms_works_or_is_refused_in_one_line() -> None:
    """Before anything trains: no pair ends in a missing phase, entry or hyper-parameter, or changes a setting."""
    refused: dict[tuple[str, str], str] = {}
    sites = {method.site: method.name for method in map(get_method, reversed(method_names()))}
    servers = {method.server: method.name for method in map(get_method, reversed(method_names()))}
    for of_site, of_server in product(sites.values(), servers.values()):
        pair = get_method(of_site, server=of_server)
        try:
            check_run(pair, TASK, {}, rounds=2, outside=[OUTSIDE] if pair.outside else [])
        except ConfigError as error:
            refused[of_site, of_server] = str(error)
            continue
        plan = pair.plan(TASK, SITES, {})
        assert plan.site_hyper == get_method(of_site).plan(TASK, SITES, {}).site_hyper, (
            "SHA's defaults once overwrote MOON's temperature"
        )
        assert pair.effective({})["site"] == get_method(of_site).effective({})["site"]
        assert pair.effective({})["server"] == get_method(of_server).effective({})["server"]
    assert [message for message in refused.values() if "\n" in message] == []
    assert not {(name, name) for name in method_names()} & refused.keys()
    assert {
        ("prr", "sha"),
        ("fedbn", "sha"),
        ("fedavg", "iop_fl"),
        ("fedavg", "scaffold"),
        ("scaffold", "sha"),
    } <= refused.keys()
    assert (
        not {
            ("moon", "sha"),
            ("iop_fl", "sha"),
            ("grace", "sha"),
            ("fedrep", "grace"),
            ("ditto", "robust"),
        }
        & refused.keys()
    )


def test_a_run_setting_is_not_taken_as_hyper_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    """`--set outside=personal` once made eight sites of the letters of a word."""
    with pytest.raises(ConfigError, match="outside_model"):
        get_method("prr").check({"outside": "personal"})
    get_method("prr").check({"outside_model": "personal"})
    assert main(["run", "prr", "--engine", "local", "--set", "outside=personal"]) != 0
    assert "--outside" in capsys.readouterr().err


def test_a_stored_model_of_an_unknown_kind_is_refused(squares: ModuleType, tmp_path: Path) -> None:
    """A super model was once built as the plain model that is a part of it."""
    save_model(
        tmp_path, squares.SEGMENTATION, Message({"model": squares.start()}, {"kind": "super"}), {}
    )
    with pytest.raises(ConfigError, match="super"):
        load_model(tmp_path).build()


# ---- methods of other distributions --------------------------------------------------------------------------------------


@pytest.fixture
def discovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """To be called once distributions lie in `tmp_path`: Python and the catalogue then find them, until the test ends."""

    def forget() -> None:
        for cached in (catalogue._foreign, catalogue._builder):
            cached.cache_clear()

    def look() -> None:
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield look
    forget()
    for name in [name for name in sys.modules if name.split(".")[0] == FOREIGN]:
        del sys.modules[name]


class TestOtherDistributions:
    def test_an_installed_method_runs_like_a_builtin_one(
        self, tmp_path: Path, discovered: Callable[[], None]
    ) -> None:
        install(tmp_path)
        discovered()
        assert FOREIGN in method_names() and module_of(FOREIGN) == "damped_fedavg"
        assert get_method(FOREIGN).effective({})["server"] == {
            "rule": "mean",
            "selection": "median",
            "step": 0.5,
            "weighting": "samples",
        }
        assert get_method("moon", server=FOREIGN).name == f"moon+{FOREIGN}"
        runs: list[tuple[str, dict[str, Any]]] = [
            (FOREIGN, {}),
            (FOREIGN, {"step": 1.0}),
            ("fedavg", {}),
        ]
        damped, undamped, fedavg = (
            run(name, tmp_path / str(place), **step) for place, (name, step) in enumerate(runs)
        )
        assert damped["status"] == undamped["status"] == fedavg["status"] == "COMPLETED"
        assert undamped["sites"] == fedavg["sites"]
        models = [
            load_file(tmp_path / str(place) / "models" / "global" / "model.safetensors")
            for place in range(3)
        ]
        assert all(models[1][name].equal(models[2][name]) for name in models[1])
        assert any(not models[0][name].equal(models[2][name]) for name in models[0])

    @pytest.mark.parametrize(
        ("name", "distributions"),
        [("fedavg", ["bold"]), ("watch", ["bold"]), ("same", ["one", "two"])],
        ids=["of medflare", "of the command line", "of two distributions"],
    )
    def test_a_name_in_use_is_refused(
        self, tmp_path: Path, discovered: Callable[[], None], name: str, distributions: list[str]
    ) -> None:
        for distribution in distributions:
            describe(tmp_path, distribution, {name: f"{distribution}:METHOD"})
        discovered()
        with pytest.raises(ConfigError, match=name):
            method_names()
        assert get_method("fedavg").server == "medflare.methods.fedavg.server:FedAvgServer"

    @pytest.mark.parametrize(
        "target",
        [
            "nowhere:METHOD",
            "json:METHOD",
            "'json:dumps'",
            "json:dumps",
            "medflare.methods.fedavg:METHOD",
        ],
        ids=["no module", "no such name in it", "malformed", "no method", "another name"],
    )
    def test_a_method_that_cannot_be_loaded_is_named(
        self, tmp_path: Path, discovered: Callable[[], None], target: str
    ) -> None:
        describe(tmp_path, "hasty", {"hasty": target})
        discovered()
        assert "hasty" in method_names(), "a name needs no import"
        with pytest.raises(ConfigError, match="hasty") as caught:
            get_method("hasty")
        assert "\n" not in str(caught.value)
        assert get_method("fedavg").name == "fedavg"
