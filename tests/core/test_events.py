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


def test_the_events_of_a_site_have_a_limit() -> None:
    """They are in every checkpoint: a site that sends 100 with each reply would end the run."""
    log = EventLog()
    log.add("missing", "no reply", "B")
    for _ in range(20):
        log.extend([{"kind": "warning", "message": "again"}] * 100, site="A", round=0)
    log.extend([{"kind": "warning", "message": "of another site"}], site="B", round=0)
    of_site = [event["message"] for event in log if event["site"] == "A"]
    assert len(of_site) == 1000 and of_site[-1].startswith("further events")
    assert [event["site"] for event in log].count("B") == 2
    log.add("failed", "the server's words about the site", "A")
    log.extend([{"kind": "at_chance", "message": "no better"}], site="A")
    assert len(log) == 1003 and log.of("at_chance")
    resumed = EventLog()
    resumed.restore(log.to_list())
    resumed.add("failed", "after the resume", "A")
    assert resumed.to_list() == log.to_list()


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
