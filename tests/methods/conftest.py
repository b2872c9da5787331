"""What the tests of the methods share."""

from types import ModuleType

import pytest

import methods.squares
from medflare.federation import final_models
from medflare.tasks import summaries


@pytest.fixture(scope="session")
def squares() -> ModuleType:
    """The small federation of methods/squares.py."""
    return methods.squares


@pytest.fixture
def plain_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Site reports without pictures, intervals of few resamples: no method changes how these are made, and they take a fifth of a run's time."""
    monkeypatch.setattr(final_models, "examples", lambda *_: {})
    monkeypatch.setattr(summaries, "RESAMPLES", 50)
