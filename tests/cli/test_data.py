"""`medflare data` and `medflare task`: options, prompts on a terminal, and the task if none is named."""

import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from helpers.downloaded_folders import classes
from helpers.fixture_types import Refused
from helpers.volume_sites import TASK, make_volumes
from medflare.cli import main
from medflare.core.text import Say
from medflare.inference.predict import PredictionSummary
from medflare.tasks.config import load_task


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sites of a classification."""
    data = tmp_path / "DATA"
    options = [
        "--patient",
        r"^(p\d+)",
        "--sites",
        "2",
        "--shares",
        "50,25,25",
        "--seed",
        "3",
        "--out",
        str(data),
    ]
    assert main(["data", "init", str(classes(tmp_path / "pets")), *options]) == 0
    return data


ESCAPE: Final = "\x1b[2J"


def test_names_of_a_folder_cannot_write_over_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = classes(tmp_path / "pets", names=(f"cat{ESCAPE}", "dog"))
    assert main(["data", "init", str(folder), "--out", str(tmp_path / "DATA")]) == 0
    printed = capsys.readouterr()
    assert "cat\\x1b[2J" in printed.out and ESCAPE not in printed.out + printed.err
    named = (tmp_path / "DATA").rename(tmp_path / f"DATA{ESCAPE}")
    assert main(["data", "fingerprint", str(named), "--out", str(tmp_path / "sites.json")]) == 0
    printed = capsys.readouterr()
    assert "DATA\\x1b[2J: " in printed.out and ESCAPE not in printed.out + printed.err


def test_names_of_sites_cannot_write_over_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("A", "B"):
        classes(tmp_path / "hospitals" / name)
    classes(tmp_path / "hospitals" / f"C{ESCAPE}" / "test", patients=6)
    data, task = str(tmp_path / "DATA"), str(tmp_path / "task.json")
    init = ["data", "init", str(tmp_path / "hospitals"), "--site-folders", "--out", data]
    assert main(init) == 0
    settings = ["--network", "small_cnn", "--size", "32,32", "--yes", "--out", task]
    assert main(["task", "init", data, *settings]) == 0
    assert main(["data", "check", data, "--task", task]) == 0
    printed = capsys.readouterr()
    assert "--outside 'C\\x1b[2J'" in printed.out and ESCAPE not in printed.out + printed.err


def test_names_of_a_model_and_of_images_cannot_write_over_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site of a super model, and an image outside the training range."""

    def predicted(*arguments: Any, say: Say, **settings: Any) -> PredictionSummary:
        summary = PredictionSummary(tmp_path / "predictions.csv", say, images=1, outside={})
        summary.differs(f"a{ESCAPE}.png", {"size": "9"})
        summary.predicted_by[f"site{ESCAPE}"] += 1
        return summary

    monkeypatch.setattr("medflare.inference.deployed.load_model", lambda *_, **__: None)
    monkeypatch.setattr("medflare.inference.predict.predict", predicted)
    assert main(["predict", "MODEL", "IMAGES", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "a\\x1b[2J.png" in printed.err and "site\\x1b[2J" in printed.out
    assert ESCAPE not in printed.out + printed.err


def test_from_a_folder_to_sites_and_a_task(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "task.json"
    assert (
        main(
            [
                "task",
                "init",
                str(root),
                "--yes",
                "--name",
                "pets",
                "--size",
                "32,16",
                "--out",
                str(task),
            ]
        )
        == 0
    )
    assert f"--data-root {root} --rounds 20 --engine local" in capsys.readouterr().out
    assert (json.loads(task.read_text())["name"], json.loads(task.read_text())["size"]) == (
        "pets",
        [32, 16],
    )
    assert main(["data", "check", str(root), "--task", str(task)]) == 0


def test_on_a_terminal_it_asks(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"size": "32,32", "network": "DenseNet121"}
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda option, default: answers.pop(option, default))
    task = tmp_path / "task.json"
    assert main(["task", "init", str(root), "--name", "pets", "--out", str(task)]) == 0
    settings = json.loads(task.read_text())
    assert not answers and (settings["size"], settings["network"]["name"], settings["labels"]) == (
        [32, 32],
        "DenseNet121",
        ["cat", "dog"],
    )


def test_a_place_that_cannot_be_written_is_said_before_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("medflare.preparation.proposing.propose", None)
    monkeypatch.setattr("medflare.preparation.fingerprint.fingerprints", None)
    (tmp_path / "file").write_text("")
    for command in (["task", "init"], ["data", "fingerprint"]):
        for place in (tmp_path, tmp_path / "file" / "task.json"):
            assert str(tmp_path) in refused(*command, str(tmp_path), "--out", str(place))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("data", "init", "{root}", "--copy"), "--copy"),
        (
            ("data", "init", "{root}", "--sites", "2", "--site-column", "a", "--out", "x"),
            "--site-column",
        ),
        (("data", "init", "{root}", "--sites", "0", "--out", "x"), "--sites 0"),
        (("data", "init", "{root}", "--shares", "1"), "--shares"),
        (("task", "init", "{root}", "--size", "big", "--out", "{root}/t.json"), "--size"),
        (("task", "init", "{root}", "--out", "{root}/cat/p00_0.png"), "--force"),
        (("task", "plan", "nosuch.json", "--out", "{root}/cat/p00_0.png"), "--force"),
        (("task", "plan", "nosuch.json", "--out", "{root}/cat/p00_0.png", "--force"), "nosuch"),
        (("data", "check", "{root}", "--local", "nosuch.json"), "nosuch.json"),
        (("data", "prepare", "prostate"), "--from"),
    ],
)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], named: str, tmp_path: Path, refused: Refused
) -> None:
    classes(tmp_path, patients=6)
    assert (
        named in refused(*(option.format(root=tmp_path) for option in options))
        and not (tmp_path / "datalist.json").exists()
    )


def test_a_site_with_test_images_only_takes_the_task_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hospitals = tmp_path / "hospitals"
    for name in ("A", "B"):
        classes(hospitals / name)
    classes(hospitals / "C" / "test", patients=6)
    data, task, run = (str(tmp_path / name) for name in ("DATA", "task.json", "run"))
    assert main(["data", "init", str(hospitals), "--site-folders", "--out", data]) == 0
    settings = ["--network", "small_cnn", "--size", "32,32"]
    assert main(["task", "init", data, "--yes", *settings, "--out", task]) == 0
    *_, command = capsys.readouterr().out.splitlines()
    assert command.startswith("      medflare run fedavg") and " --outside C " in command
    assert main([*command.split()[1:], "--rounds", "1", "--out", run]) == 0
    capsys.readouterr()
    alone = str(tmp_path / "alone")
    assert main(["data", "init", str(hospitals / "C"), "--out", alone]) == 0
    assert f"next: medflare data check {alone} --task task.json" in capsys.readouterr().out
    assert main(["data", "check", alone, "--task", task]) == 0


@pytest.mark.parametrize("place", ["", "site-1"], ids=["of the sites", "of one site"])
def test_the_task_beside_the_data_is_taken(
    root: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = root / "task.json"
    assert (
        main(
            [
                "task",
                "init",
                str(root),
                "--yes",
                "--name",
                "beside",
                "--size",
                "32,16",
                "--out",
                str(task),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["data", "check", str(root / place)]) == 0
    output, errors = capsys.readouterr()
    assert "beside" in output and str(task.resolve()) in errors
    *_, verdict, command = output.splitlines()
    assert verdict == "OK" and command == (
        f"next: medflare run fedavg --task {task.resolve()} --data-root {root / place} "
        "--rounds 20 --engine local"
    )
    listed = []
    for site in (place,) if place else ("site-1", "site-2"):
        content = json.loads((root / site / "datalist.json").read_text())
        listed.append(f"{site} {len(content['validation'])}")
    assert f"chosen on few of them ({', '.join(listed)}). Give validation more" in output


def test_a_task_is_proposed_where_none_is_beside_the_data(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["data", "fingerprint", str(root)]) == 0
    output, errors = capsys.readouterr()
    assert [site["site"] for site in json.loads(output)["sites"]] == ["site-1", "site-2"], (
        "JSON alone is printed"
    )
    assert "task: pets" in errors and not (root / "task.json").exists()


def test_data_that_no_task_can_be_proposed_for_are_one_line(
    root: Path, tmp_path: Path, refused: Refused
) -> None:
    for image in (root / "site-1").rglob("*.png"):
        image.write_bytes(b"no picture")
    assert "nowhere" in refused("data", "check", str(tmp_path / "nowhere"))
    problem = refused("data", "check", str(root))
    assert "no task can be proposed" in problem and "--task" not in problem, "it would not help"


def test_fingerprints_and_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    data = tmp_path / "data"
    task = tmp_path / "cubes.json"
    sites = tmp_path / "out/sites.json"
    planned = tmp_path / "task.json"
    for name in ("A", "B"):
        make_volumes(data / name, shape=(16, 16, 16))
    task.write_text(json.dumps(TASK))
    assert main(["data", "fingerprint", str(data), "--task", str(task), "--out", str(sites)]) == 0
    assert (
        main(
            [
                "task",
                "plan",
                str(sites),
                "--memory",
                "4",
                "--name",
                "planned_cubes",
                "--out",
                str(planned),
            ]
        )
        == 0
    )
    assert "planned from 6 training images (A, B)" in capsys.readouterr().out
    actual = load_task(planned)
    assert (actual.name, actual.spacing, actual.labels) == (
        "planned_cubes",
        (2.0, 1.0, 3.0),
        ("cube",),
    )
    assert str(planned) in refused("task", "plan", str(planned), "--out", str(planned))
