"""The whole catalogue by one set of tests, which a method joins by existing; methods of other distributions; algorithms in pairs."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

import medflare
from foreign.install import METHOD as FOREIGN
from foreign.install import describe, install
from helpers.small_tasks import tiny_phantom
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.core.extensions import PACKAGES_VARIABLE
from medflare.core.hyper import ALGORITHMS, described
from medflare.core.message import Message
from medflare.federation.local.loop import run_local
from medflare.federation.preflight import check_run
from medflare.federation.settings import RUN_SETTINGS, RunSettings
from medflare.inference.deployed import load_model, save_model
from medflare.methods import catalogue
from medflare.methods.catalogue import build_deployed, get_method, method_names, module_of
from medflare.tasks.config import load_task
from medflare.testing import OUTSIDE, SITES, TASK, check_method
from methods import squares

# Where the paper's number of steps would take a test too long.
SHORTER: dict[str, dict[str, Any]] = {"fedsm_extra": {"selector_rounds": 2}}


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


# Where sites must annotate structures.
OTHER_TASKS = {"condist": load_task(tiny_phantom())}


@pytest.mark.parametrize("name", method_names())
@pytest.mark.usefixtures("plain_reports")
def test_every_method_passes_the_kit(name: str) -> None:
    checks = check_method(name, OTHER_TASKS.get(name, TASK), **SHORTER.get(name, {}))
    assert [f"{check.name}: {check.problem}" for check in checks if check.problem] == []
    assert len(checks) == 9


def test_all_methods_but_prr_keep_the_optimizers_moments_by_default() -> None:
    """They stay at the site, as in training alone; PRR alone has no choice, and starts every round afresh. Ridge has no optimizer."""
    rules = {}
    for name in method_names():
        if name != FOREIGN:
            rules[name] = get_method(name).effective({})["site"].get("reset_optimizer")
    without = {name: rule for name, rule in rules.items() if rule is not False}
    assert without == {"prr": None, "ridge": None}


@pytest.mark.parametrize("name", method_names())
def test_hyper_parameters_are_described_and_no_settings_of_a_run(name: str) -> None:
    """One that shared its name with an argument of `run_local` would be swallowed by it."""
    taken = {*RUN_SETTINGS, *inspect.signature(run_local).parameters, *ALGORITHMS}
    method = get_method(name)
    for algorithm, owner in method.hyper_classes.items():
        assert not taken & described(owner).keys(), algorithm
        assert [about.name for about in described(owner).values() if not about.text] == []


@pytest.mark.parametrize("name", method_names())
def test_every_entry_that_leaves_a_site_has_a_purpose(name: str) -> None:
    method = get_method(name)
    plan = method.plan(TASK, SITES, {})
    for phase in method.site_class.phases.values():
        for spec in method.site_class.manifest(phase.name, plan).values():
            assert spec.purpose, phase.name


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
    names = [*reversed(method_names()), "fedavg"]  # whose algorithms are those of other methods too
    sites = {method.site: method.name for method in map(get_method, names)}
    servers = {method.server: method.name for method in map(get_method, names)}
    for of_site, of_server in product(sites.values(), servers.values()):
        pair = get_method(of_site, server=of_server)
        try:
            outside = (OUTSIDE,) if pair.outside else ()
            check_run(pair, TASK, {}, RunSettings(rounds=2, seed=0, outside=outside))
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
    assert {of_site for of_site, of_server in refused if of_site == of_server} == {*OTHER_TASKS}
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


def test_a_stored_model_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
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
        for name in models[1]:
            assert models[1][name].equal(models[2][name])
        assert any(not models[0][name].equal(models[2][name]) for name in models[0])

    @pytest.mark.parametrize(
        ("name", "distributions"),
        [("fedsm", ["bold"]), ("watch", ["bold"]), ("same", ["one", "two"])],
        ids=["of medflare", "of the command line", "of two distributions"],
    )
    def test_a_name_in_use_is_refused_alone(
        self,
        tmp_path: Path,
        discovered: Callable[[], None],
        name: str,
        distributions: list[str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        install(tmp_path)
        for distribution in distributions:
            describe(tmp_path, distribution, {name: f"{distribution}:METHOD"})
        discovered()
        with pytest.raises(ConfigError, match=rf"'{name}'.*bold|'{name}'.*one and .*two"):
            get_method(name)
        for other in (FOREIGN, "fedprox"):
            assert get_method(other).name == other
        assert main(["methods"]) == 1
        listed, refused = capsys.readouterr()
        assert f"\n{FOREIGN} " in listed and f"\n{name} " not in listed
        assert refused.startswith("medflare: method") and refused.count("\n") == 1
        assert catalogue.builtin_builder("super") is not None

    @pytest.mark.parametrize(
        ("target", "reason"),
        [
            ("nowhere:METHOD", "No module named 'nowhere'"),
            ("json:METHOD", "has no attribute 'METHOD'"),
            ("'json:dumps'", "hasty"),
            ("json:dumps", "json:dumps is a function; name a Method"),
            ("medflare.methods.fedavg:METHOD", "named 'fedavg', the entry point 'hasty'; give"),
        ],
        ids=["no module", "no such name in it", "malformed", "no method", "another name"],
    )
    def test_a_method_that_cannot_be_loaded_is_named(
        self, tmp_path: Path, discovered: Callable[[], None], target: str, reason: str
    ) -> None:
        describe(tmp_path, "hasty", {"hasty": target})
        discovered()
        assert "hasty" in method_names(), "a name needs no import"
        with pytest.raises(ConfigError, match=f"'hasty'.*{reason}") as caught:
            get_method("hasty")
        assert "\n" not in str(caught.value)
        assert get_method("fedavg").name == "fedavg"

    @pytest.mark.parametrize("by", ["the environment", "the user"])
    def test_a_models_card_imports_no_method_that_is_not_trusted(
        self,
        tmp_path: Path,
        discovered: Callable[[], None],
        monkeypatch: pytest.MonkeyPatch,
        by: str,
    ) -> None:
        (tmp_path / "odd.py").write_text(
            "from torch.nn import Identity\n"
            "from medflare.methods import Method\n"
            "METHOD = Method(name='odd', title='t', paper='p', site='x:X', server='x:X',\n"
            "    models={'odd_kind': lambda task, message: Identity()})\n"
        )
        describe(tmp_path, "odd", {"odd": "odd:METHOD"})
        describe(tmp_path, "other", {"other": "other_methods:METHOD"})
        discovered()
        model = Message({}, {"kind": "odd_kind"})
        with pytest.raises(
            ConfigError, match=rf"'odd_kind'.*odd, other_methods.*{PACKAGES_VARIABLE}"
        ) as refused:
            build_deployed(TASK, model)
        assert "odd" not in sys.modules and "\n" not in str(refused.value)
        if by == "the user":
            get_method("odd")
        monkeypatch.setenv(PACKAGES_VARIABLE, "odd" if by == "the environment" else "")
        try:
            assert isinstance(build_deployed(TASK, model), nn.Identity)
        finally:
            sys.modules.pop("odd", None)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedlora", {"rank": 257}),
        ("elcfs", {"images": 2001}),
        ("ccst", {"images": 2001}),
        ("fed_gaussian", {"samples": 5001}),
    ],
)
def test_a_number_that_decides_on_memory_has_a_limit(name: str, hyper: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="less than or equal to"):
        get_method(name).check(hyper, TASK)
