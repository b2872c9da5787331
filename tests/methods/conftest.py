"""What the tests of the methods share."""

import pytest

from medflare.federation import final_models
from medflare.tasks import summaries


@pytest.fixture
def plain_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Site reports without pictures, intervals of few resamples: no method changes how these are made, and they take a fifth of a run's time."""
    monkeypatch.setattr(final_models, "examples", lambda *_: {})
    monkeypatch.setattr(summaries, "_RESAMPLES", 50)
