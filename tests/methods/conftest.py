"""What the tests of the methods share."""

from types import ModuleType

import pytest

import methods.squares


@pytest.fixture(scope="session")
def squares() -> ModuleType:
    """The small federation of methods/squares.py."""
    return methods.squares
