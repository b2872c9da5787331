"""`medflare methods`: complete, and readable in every window and in a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.pair import BARE, PAIR
from foreign.install import describe
from helpers.fixture_types import Refused
from medflare.cli import main
from medflare.cli.methods import method_listing
from medflare.core.hyper import described
from medflare.evaluation.presentation import format_setting
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.method import paired


def test_two_halves_by_hand() -> None:
    lines = [line.strip() for line in method_listing(PAIR).splitlines()]
    assert lines[:3] == [
        "pair: Two Algorithms",
        "Nobody, Nowhere 2000",
        "models: global, personal, deployed",
    ]
    assert lines[3:6] == ["site", "site.beta = 0.5  [β, Eq. 3; ≥ 0]", "weight of the prior"]
    assert {
        "rounds = 2  [1 to 9]",
        "lam = none  [λ]",
        "server.beta = 0.9  [≤ 1]",
        "selection = best  [best, last]",
    } <= {*lines}


def test_a_pair_says_whose_halves_it_has() -> None:
    assert "beta = 0.5  [β, Eq. 3; ≥ 0]" in method_listing(BARE), "one half alone has it"
    lines = method_listing(paired(BARE, PAIR)).splitlines()
    assert lines[0].startswith("bare+pair: ") and {
        "  site algorithm of bare",
        "  server algorithm of pair",
    } <= {*lines}


@pytest.mark.parametrize("name", method_names())
def test_every_hyper_parameter_is_there_and_fits(name: str) -> None:
    method = get_method(name)
    plain = method_listing(method)
    narrow = method_listing(method, 60)
    assert max(map(len, narrow.splitlines())) <= 60 and plain.split() == narrow.split()
    lines = plain.splitlines()
    fields = {algorithm: described(owner) for algorithm, owner in method.hyper_classes.items()}
    for algorithm, own in fields.items():
        for about in own.values():
            shown = (
                f"{algorithm}.{about.name}"
                if all(about.name in others for others in fields.values())
                else about.name
            )
            start = f"    {shown} = {format_setting(about.default)}"
            (place,) = [place for place, line in enumerate(lines) if line.startswith(start)]
            assert lines[place + 1].strip() == about.text


def test_what_is_exchanged_is_listed() -> None:
    lines = method_listing(get_method("scaffold")).splitlines()
    exchanged = lines[lines.index("  exchanged") + 1 :]
    sent = "model, control_update, n_samples, loss, validation"
    assert exchanged[0] == f"    train: in model, control, counted; out {sent}"
    assert exchanged[2].startswith("        control_update: change of the site's control variate")
    assert "    finalize: in model, selected_round; out test metrics" in exchanged


def test_a_pipe_gets_whole_lines_and_a_terminal_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["methods", "moon", "--server-algorithm", "grace"]) == 0
    assert capsys.readouterr().out == method_listing(get_method("moon", server="grace")) + "\n"
    assert main(["methods"]) == 0
    output = capsys.readouterr().out
    for name in method_names():
        assert f"\n{name} " in output
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", "grace"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--site-algorithm", "moon"], "--site-algorithm"),
        (["fedsmm"], "'fedsmm'"),
        (["fedavg", "--simulator"], "--check"),
    ],
)
def test_what_is_no_method_is_one_line(words: list[str], named: str, refused: Refused) -> None:
    assert named in refused("methods", *words)


COMMAND = [sys.executable, "-m", "medflare.cli", "methods"]
PATH = ":".join(sys.path)


def test_methods_of_other_distributions_are_listed_alike(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "import dataclasses\nfrom cli.pair import PAIR\nMETHOD = dataclasses.replace(PAIR, name='theirs')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{describe(tmp_path, 'their-lab', {'theirs': 'theirs:METHOD'})}:{PATH}",
    }
    output = subprocess.run(
        COMMAND, env=environment, capture_output=True, text=True, check=True
    ).stdout
    lines = output.splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith("theirs "))
    assert PAIR.title in lines[place]
    assert lines[place - 2] == "their-lab", "below their distribution, not among the papers"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": PATH}
    listing = subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert listing.stdout is not None and listing.stderr is not None
    listing.stdout.close()
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert listing.wait() == 1
