"""The console: one table, and only plain text in a log file."""

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import StateError
from medflare.evaluation import console
from medflare.evaluation.console import print_results, results_table, show_results
from medflare.evaluation.report import render_report, write_results
from medflare.evaluation.results import RunRecord, build_results
from medflare.tasks.config import TaskConfig


def test_tables_of_a_method_are_below(record: RunRecord) -> None:
    rows: dict[str, Any] = {"A": {"images": 4}, "B": {"images": 5, "size": "8 x 8"}}
    text = results_table(
        build_results(dataclasses.replace(record, tables={"Training images": rows}))
    )
    lines = [line.split() for line in text.splitlines()[-3:]]
    assert lines == [
        ["Training", "images", "A", "B"],
        ["images", "4", "5"],
        ["size", "8", "x", "8"],
    ]


def test_the_selector_of_a_super_model_is_one_line(selecting: RunRecord) -> None:
    def last_line(**changes: Any) -> str:
        return results_table(
            build_results(
                dataclasses.replace(selecting, selector={**selecting.selector, **changes})
            )
        ).splitlines()[-1]

    for part in ("gamma 0.30", "3 candidates", "+0.043", "2 of 3"):
        assert part in last_line()
    assert "+" not in last_line(votes={}, mean_gain=None)


def test_without_rich_one_line_has_the_outcome(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "installed", lambda module: False)
    line = results_table(
        build_results(dataclasses.replace(record, reason="site B: mask of another size"))
    )
    assert "FAILED: site B: mask of another size" in line and "\n" not in line


def test_the_table_is_plain_and_complete(record: RunRecord) -> None:
    text = results_table(build_results(record))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text), "no control characters but line ends"
    lines: dict[str, list[list[str]]] = {}
    for line in filter(None, map(str.split, text.splitlines())):
        lines.setdefault(line[0], []).append(line)
    assert (
        "COMPLETED" in text
        and "Synthetic discs" in text
        and "rejected at C; undefined at A\n" in text
    )
    first, second = lines["A"]
    assert first == [
        "A",
        "inside",
        "4/1/3",
        "0.400",
        "0.500",
        "–",
        "0.250",
        "0.333",
        "–",
    ] and second[3:] == ["8.0", "–", "–"]
    assert lines["C"][0][:3] == ["C", "inside", "3/?/?"]
    assert (
        lines["mean"][0][:4] == ["mean", "inside", "0.500", "0.650"]
        and max(map(len, text.splitlines())) <= 100
    )
    order = [line.split()[0] for line in text.splitlines()]
    assert order.index("C") < order.index("X") < order.index("mean")


@pytest.mark.parametrize("columns", [200, 70])
def test_a_terminal_gets_colour_and_tables_that_fit(
    record: RunRecord, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    print_results(build_results(record), terminal)
    text = terminal.getvalue()
    assert "\x1b[" in text and "Dice" in text and "HD95" in text
    assert max(
        len(re.sub(r"\x1b\[[\d;]*m", "", line).rstrip()) for line in text.splitlines()
    ) <= min(columns, 100)


def test_a_site_name_is_not_markup(record: RunRecord) -> None:
    named = dataclasses.replace(record, sites={"[red]evil[/red]": record.sites["B"]})
    assert "[red]evil[/red]" in results_table(build_results(named))


def test_a_metric_and_a_models_name_are_not_markup(record: RunRecord) -> None:
    results = build_results(record)
    for site in results["sites"].values():
        site["metrics"]["[link=file:///]m[/link]"] = {"[/x]": 0.5}
    for role in results["mean"]:
        results["mean"][role]["[link=file:///]m[/link]"] = {"[/x]": 0.5}
    for site in results["sites"].values():
        for model in ("global", "personal", "deployed"):
            site["metrics"][model]["[/x]"] = 0.5
        site["metrics"]["[link=file:///]m[/link]"] |= dict.fromkeys(("dice", "iou", "hd95"), 0.5)
    for models in results["mean"].values():
        for metrics in models.values():
            metrics.update(dict.fromkeys(("dice", "iou", "hd95", "[/x]"), 0.5))
    text = results_table(results)
    assert "[/x]" in text and "[link=file:///]m[/link]" in text


def test_show_results_returns_whether_the_run_completed(
    tmp_path: Path, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "good" / "medflare", record)
    assert show_results(tmp_path / "good") is True
    assert capsys.readouterr().out.endswith(
        f"report: {(tmp_path / 'good' / 'medflare' / 'report.html').resolve()}\n"
    )
    model = tmp_path / "good" / "medflare" / "sites" / "A" / "deployed"
    model.mkdir(parents=True)
    show_results(tmp_path / "good")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: medflare predict {model} IMAGES --out predictions"
    assert show_results(tmp_path) is True
    assert "runs" not in capsys.readouterr().out
    write_results(tmp_path / "bad" / "medflare", dataclasses.replace(record, reason="no data"))
    assert show_results(tmp_path / "bad") is False
    capsys.readouterr()
    assert show_results(tmp_path) is False
    assert f"{tmp_path} has 2 runs; this is the newest, {tmp_path / 'bad'}" in (
        capsys.readouterr().out
    )
    with pytest.raises(StateError):
        show_results(tmp_path / "none")


def test_several_structures_have_a_table(record: RunRecord, task: TaskConfig) -> None:
    both = {"deployed": {"disc": {"iou": 0.25, "dice": 0.5}, "cup": {"iou": 0.0, "dice": 0.0}}}
    sites = {}
    for name, site in record.sites.items():
        if name in "AB":
            sites[name] = dataclasses.replace(site, by_label=both)
    several = dataclasses.replace(
        record,
        sites=sites,
        task=dataclasses.replace(task, target="multilabel", labels=("disc", "cup")),
    )
    lines = results_table(build_results(several)).splitlines()
    title = next(place for place, line in enumerate(lines) if line.startswith("Dice by structure"))
    assert [line.split() for line in lines[title : title + 3]] == [
        ["Dice", "by", "structure,", "deployed", "model", "A", "B"],
        ["disc", "0.500", "0.500"],
        ["cup", "0.000", "0.000"],
    ]
    page = render_report(build_results(several))
    assert "Dice by structure" in page and "IoU by structure" in page
    one = dataclasses.replace(
        several,
        sites={name: dataclasses.replace(site, by_label={}) for name, site in sites.items()},
    )
    assert "by structure" not in results_table(build_results(one))
