"""Text of other parties: one printable line in errors, events, tables, names and metadata."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

import medflare
from medflare.core.errors import ConfigError, DataError, one_line
from medflare.core.events import EventLog
from medflare.core.files import csv_cell, csv_text
from medflare.core.message import Message
from medflare.core.text import format_seconds, printable_json, read_text, reason_line
from medflare.data.datalist import read_datalist
from medflare.federation.protocol import message_problem
from medflare.tasks.config import load_task

EVIL = "a\x1b]0;PWN\x07\x1b[2J\r\nb\u202egnp.exe\u2066\u200b\x00\x9b31m\ud800"
TASK = load_task("phantom").to_dict()


def test_seconds() -> None:
    times = {
        0.0: "0 s",
        9.94: "9.9 s",
        9.96: "10 s",
        59.4: "59 s",
        59.9: "1 min 00 s",
        3599.6: "1 h 00 min",
    }
    assert {seconds: format_seconds(seconds) for seconds in times} == times


def test_errors_and_events_are_one_printable_line() -> None:
    events = EventLog()
    events.add("warning", EVIL)
    texts = [
        str(DataError(EVIL)),
        one_line(ValueError(EVIL)),
        reason_line(EVIL),
        next(iter(events))["message"],
    ]
    assert (
        len(set(texts)) == 1
        and texts[0].isprintable()
        and r"\x1b[2J" in texts[0]
        and r"\u202e" in texts[0]
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("mat1 and\n\tmat2   "), "mat1 and mat2"),
        (AssertionError(), "AssertionError"),
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_another_librarys_error_is_one_line_or_its_type(error: Exception, line: str) -> None:
    assert one_line(error) == line and len(one_line(ValueError("x" * 1000))) == 200


def test_csv_has_no_control_characters() -> None:
    text = csv_text([{EVIL: EVIL, "b": -0.5}, {"b": "-1", "c": 3}], [EVIL, "b"])
    for letter in text:
        assert letter.isprintable() or letter == "\n"
    assert text.count(r"\x1b[2J") == 2
    assert (
        csv_text([{"a": "plain, with a comma"}], ["a"], header=False) == '"plain, with a comma"\n'
    )


@pytest.mark.parametrize(
    "text", ['=cmd|"/c calc"!A1', "+1+cmd", "-1+cmd|x", "@SUM(A1)", "\t=1", "\n=1", "-", "-1\n"]
)
def test_no_csv_cell_is_a_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    ((heading,), (cell,)) = csv.reader(io.StringIO(csv_text([{text: text}], [text]), newline=""))
    assert heading == cell == f"'{text}"


def test_a_carriage_return_begins_no_row() -> None:
    assert csv_text([{"a": "\r=1"}, {"a": "b\r=1"}], ["a"], header=False) == "'\\r=1\nb\\r=1\n"


@pytest.mark.parametrize("value", ["-1", "+0.5", "-1.5E-7", "a=b", "", -0.5, 3, None])
def test_numbers_and_plain_text_of_a_csv_cell_stay(value: Any) -> None:
    assert csv_cell(value) == value


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "..", ".", "x" * 5000, "a\u202eb", " "])
@pytest.mark.parametrize("setting", ["name", "labels", "channels"])
def test_names_of_a_task_that_cannot_be_printed_raise(setting: str, name: str) -> None:
    value: Any = (
        name if setting == "name" else [name, "b"] if setting == "labels" else [name, "g", "b"]
    )
    with pytest.raises(ConfigError, match=setting) as error:
        load_task({**TASK, "label_values": {}, setting: value})
    assert str(error.value).isprintable() and len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\n", "..", "x" * 101, "a/b"])
def test_names_of_sites_that_cannot_be_printed_raise(name: str) -> None:
    with pytest.raises(ConfigError, match="site"):
        medflare.run_local("fedavg", "phantom", ["A", name], rounds=1, seed=0)


@pytest.mark.parametrize("meta", [{"note": EVIL}, {"models": {"a\x1b": 1}}, {"list": [["\u202e"]]}])
def test_metadata_that_cannot_be_printed_are_rejected(meta: dict[str, Any]) -> None:
    assert message_problem(Message({}, meta), "A")


def test_an_event_with_escapes_is_accepted_and_shown_as_text() -> None:
    event = {"kind": "warning", "message": "two\nlines \x1b[2J"}
    assert message_problem(Message({}, {"events": [event]}), "A") is None
    log = EventLog([event])
    assert next(iter(log))["message"] == r"two lines \x1b[2J"


def test_names_in_a_datalist_are_shown_as_text(tmp_path: Path) -> None:
    for file in ("i\x1b[2J.png", "m.png"):
        (tmp_path / file).write_bytes(b"")
    entry = {"image": "i\x1b[2J.png", "label": "m.png", "patient": "p\u202e1"}
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [entry]}))
    (read,) = read_datalist(tmp_path, "segmentation")
    assert (read.name, read.patient) == (r"i\x1b[2J.png", r"p\u202e1") and read.image.exists()


def test_json_that_is_nested_deep_raises() -> None:
    value: Any = 1
    for _ in range(33):
        value = [value]
    assert printable_json(value[0][0])
    with pytest.raises(ValueError, match="nested"):
        printable_json(value)
    with pytest.raises(ConfigError, match="nested too deep"):
        load_task({**TASK, "network": {"name": "unet", "more": value}})


def test_pipes_are_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "notes.csv"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="a pipe or a device"):
        read_text(pipe)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "missing.csv")


def test_huge_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "huge.csv").touch()
    os.truncate(tmp_path / "huge.csv", 201 * 10**6)
    with pytest.raises(ValueError, match="201 MB, more than 200 MB"):
        read_text(tmp_path / "huge.csv")
