"""Checks of a method for its author: `check_method`, or `medflare methods --check NAME`.

Example:
    from medflare.testing import check_method

    def test_my_method() -> None:
        assert [check for check in check_method(METHOD) if check.problem] == []
"""

from medflare.testing.kit import (  # noqa: F401
    OUTSIDE,
    SITES,
    TASK,
    Check,
    Failed,
    Killed,
    check_method,
    final_models,
    in_pieces,
)
