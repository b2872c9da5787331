"""The event log keeps order, names and nothing that JSON cannot hold."""

import json

import pytest

from medflare.core.events import Event, EventLog


def test_add_keeps_order_and_fields_and_refuses_an_unknown_kind() -> None:
    log = EventLog()
    log.add("missing", "no update within 60 s", site="CS", round=3)
    log.add("warning", "gamma was not tuned")
    assert log.to_list() == [
        {"round": 3, "site": "CS", "kind": "missing", "message": "no update within 60 s"},
        {"round": None, "site": None, "kind": "warning", "message": "gamma was not tuned"},
    ]
    for event in log:
        assert tuple(event) == ("round", "site", "kind", "message")
    with pytest.raises(ValueError, match="'odd'"):
        log.add("odd", "x")


def test_extend_fills_in_only_what_is_open() -> None:
    log = EventLog()
    sent: list[Event] = [
        {"kind": "undefined", "message": "a"},
        {"kind": "late", "message": "b", "site": "FG", "round": 0},
    ]
    log.extend(sent, site="CS", round=7)
    assert [(event["site"], event["round"]) for event in log] == [("CS", 7), ("FG", 0)]


def test_list_is_a_copy_and_json_round_trips() -> None:
    log = EventLog([{"kind": "joined", "message": "late", "site": "A", "round": 2}])
    log.to_list()[0]["site"] = "changed"
    assert next(iter(log))["site"] == "A"
    assert EventLog(json.loads(json.dumps(log.to_list()))).to_list() == log.to_list()
    log.restore([{"kind": "late", "message": "before", "site": None, "round": 1}])
    assert [event["message"] for event in log] == ["before", "late"] and log.restored == 1
