"""Whatever a site has written to its log because it could not answer, the explanation of the job says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from flare.jobs.sessions import Served
from medflare.core.errors import ConfigError
from medflare.flare.executors import FedAvgExecutor
from medflare.flare.jobs.explaining import explained, explanations

LINES = (
    "site A stops: the step takes longer than the 5 minutes of its bounds.minutes",
    "site A trains with differential privacy only (privacy in its local/medflare.json), this job without: set dp_noise",
    "site A does not take what the server sent for 'train' of round 0: missing entry 'model'",
    "site A was asked to work before it enrolled, or its state is gone",
    "the process that worked on 'train' of round 3 died",
)


def logged(error: Exception, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the executor writes to the site's log when a step ends with this error."""

    def broken(*arguments: object) -> Shareable:
        raise error

    monkeypatch.setattr(FedAvgExecutor, "_reply", broken)
    monkeypatch.setattr(FedAvgExecutor, "_spec", lambda *arguments: SimpleNamespace(folder=folder))
    FedAvgExecutor(seed=0).execute("train", Shareable(), FLContext(), Signal())
    return caplog.text


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_line_is_explained(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = logged(ConfigError(line), tmp_path, caplog, monkeypatch)
    assert list(explanations([("A", text)])) == [f"A could not do its part: {line}"]


def test_the_party_is_not_named_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = logged(ConfigError("site A: data root data does not exist"), tmp_path, caplog, monkeypatch)
    assert list(explanations([("A", text)])) == ["A could not do its part: data root data does not exist"]


def test_an_unexpected_error_is_explained_by_its_kind_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = logged(ZeroDivisionError("division by zero"), tmp_path, caplog, monkeypatch)
    assert "Traceback" not in text and "division by zero" in (tmp_path / "errors.log").read_text()
    (said,) = explanations([("A", text)])
    assert said.startswith("A could not do its part: ZeroDivisionError in 'train' of round 0")


def test_what_nobody_failed_for_is_no_explanation() -> None:
    assert list(explanations([("A", "medflare: noted: warning: two sites only\nINFO - medflare: site A: 12 images")])) == []


def test_the_logs_that_are_read_do_not_stay_in_the_kit(tmp_path: Path) -> None:
    """Else results that are fetched later would get another name there."""

    class Logged(Served):
        def list_job_components(self, identity: str) -> list[str]:
            return ["ERRORLOG_site-1"]

        def download_job_components(self, identity: str) -> str:
            (tmp_path / identity).mkdir()
            (tmp_path / identity / "ERRORLOG_site-1").write_text("ERROR - No module named 'medflare'")
            return str(tmp_path / identity)

    (said,) = explained(cast(Any, Logged("FINISHED:ABORTED")), "id")
    assert said.startswith("site-1 lacks the Python package medflare") and not [*tmp_path.iterdir()]
