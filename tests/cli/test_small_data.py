"""A newcomer's first hour: 120 photographs in five grades, some of them rare, from a table to a report that says what it is worth."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.fixture_types import Refused
from medflare.cli import main
from medflare.core.events import DOUBTS
from medflare.data.phantom import photographs
from medflare.evaluation.findings import findings_of
from medflare.networks import weights
from medflare.networks.weights import PACKAGE, packaged_weights

GRADES = {"none": 54, "mild": 8, "moderate": 34, "severe": 18, "proliferative": 6}


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Three simulated hospitals, from photos/ and grades.csv: fundus photographs with as many dark spots as the grade says."""
    folder = tmp_path / "retina"
    (folder / "photos").mkdir(parents=True)
    random = np.random.default_rng(0)
    pictures = []
    for site in ("a", "b"):
        for photograph in photographs(site):
            pictures.append(photograph.image)
    grades = random.permutation(np.repeat(np.arange(len(GRADES)), [*GRADES.values()]))
    rows = ["Image name,Retinopathy grade"]
    for number, grade in enumerate(grades):
        image = pictures[number].copy()
        for row, column in random.integers(4, 60, (2 * grade, 2)):
            image[row : row + 2, column : column + 2] //= 4
        Image.fromarray(image).save(folder / "photos" / f"IDRiD_{number:03}.png")
        rows.append(f"IDRiD_{number:03},{grade}")
    (folder / "grades.csv").write_text("\n".join(rows) + "\n")
    data = tmp_path / "DATA"
    assert main(["data", "init", str(folder), "--sites", "3", "--out", str(data)]) == 0
    return data


def proposed(sites: Path, task: Path, *options: str) -> dict[str, Any]:
    assert main(["task", "init", str(sites), "--yes", "--out", str(task), *options]) == 0
    content: dict[str, Any] = json.loads(task.read_text())
    return content


def run(sites: Path, out: Path, *options: str) -> tuple[dict[str, Any], Path]:
    places = ["--data-root", str(sites), "--sites", "site-1,site-2,site-3", "--out", str(out)]
    assert main(["run", "fedavg", "--engine", "local", *places, *options]) == 0
    (folder,) = out.iterdir()
    return json.loads((folder / "results.json").read_text()), folder


def test_warnings_about_a_doubtful_model_are_in_all_outputs(
    sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "task.json"
    proposed(sites, task, "--network", "small_cnn", "--size", "32,32")
    assert "warning: site-1" in capsys.readouterr().out, "classes that are too rare at a site"
    results, folder = run(
        sites, tmp_path / "runs", "--task", str(task), "--rounds", "2", "--epochs", "1"
    )
    assert {event["kind"] for event in results["events"]} >= {*DOUBTS}
    after_run = capsys.readouterr().out
    assert main(["results", str(folder)]) == 0
    after_results = capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert {finding.kind for finding in findings_of(results)} >= {*DOUBTS}
    for finding in findings_of(results):
        assert (
            finding.line in after_run and finding.line in after_results and finding.problem in page
        )


def test_weights_of_a_package_are_proposed_with_their_hash(
    sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        PACKAGE, reason="the weights of EfficientNet-Lite0 are not installed (medflare[pretrained])"
    )
    task = tmp_path / "task.json"
    actual = proposed(sites, task)
    assert actual["network"] == {
        "name": "efficientnet_lite0",
        "weights": packaged_weights("efficientnet_lite0"),
    }
    assert (actual["channels"], actual["size"], actual["intensity"]["b_min"], actual["freeze"]) == (
        3,
        [224, 224],
        -1.0,
        ["body"],
    )
    assert actual["augment"] == [], "features of an image are computed once"
    assert "package" in capsys.readouterr().out, "with a reason"
    results, _ = run(
        sites, tmp_path / "runs", "--task", str(task), "--rounds", "1", "--epochs", "1"
    )
    assert (
        results["configuration"]["task"]["network"]["weights"]["sha256"]
        == actual["network"]["weights"]["sha256"]
    )
    assert proposed(sites, tmp_path / "small.json", "--network", "small_cnn")["network"] == {
        "name": "small_cnn"
    }


def test_without_the_package_one_line_says_how_to_get_it(
    sites: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    assert proposed(sites, tmp_path / "task.json")["network"] == {"name": "small_cnn"}
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "medflare[pretrained]" in line
    ]
    assert line.startswith("warning: ")
    named = "medflare[pretrained]"
    assert named in refused(
        "task", "init", str(sites), "--yes", "--pretrained", "--out", str(tmp_path / "other.json")
    )
    assert named in refused(
        "run",
        "fedavg",
        "--network",
        "efficientnet_lite0",
        "--pretrained",
        "--data-root",
        str(sites),
    )


def test_pretrained_weights_by_an_option_of_run(sites: Path, tmp_path: Path) -> None:
    pytest.importorskip(
        PACKAGE, reason="the weights of EfficientNet-Lite0 are not installed (medflare[pretrained])"
    )
    task = tmp_path / "task.json"
    proposed(sites, task, "--network", "small_cnn", "--size", "32,32")
    results, _ = run(
        sites,
        tmp_path / "runs",
        "--task",
        str(task),
        "--network",
        "efficientnet_lite0",
        "--pretrained",
        "--rounds",
        "1",
        "--epochs",
        "1",
    )
    used = results["configuration"]["task"]
    assert used["network"] == {
        "name": "efficientnet_lite0",
        "weights": packaged_weights("efficientnet_lite0"),
    }
    assert (used["intensity"]["b_min"], used["intensity"]["b_max"], used["size"]) == (
        -1.0,
        1.0,
        [32, 32],
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--pretrained"], "unet"),  # of the task phantom: no package brings weights for it
        (["--network", "resnet18", "--pretrained"], "resnet18"),
        (
            [
                "--network",
                "efficientnet_lite0",
                "--pretrained",
                "--task",
                "phantom_grades",
                "--set",
                "task.channels=1",
            ],
            "task.channels=3",
        ),
        (["--network", "efficientnet_lite", "--task", "phantom_grades"], "efficientnet_lite0"),
    ],
)
def test_unavailable_weights_are_errors(options: list[str], word: str, refused: Refused) -> None:
    assert word in refused("run", "fedavg", "--engine", "local", *options)
