"""What another library says becomes a part of one line."""

from medflare.core.errors import one_line


def test_an_error_is_one_line() -> None:
    assert one_line(RuntimeError("mat1 and mat2\n\tcannot be   multiplied ")) == "mat1 and mat2 cannot be multiplied"
    assert one_line(AssertionError()) == "AssertionError", "one that says nothing"
    assert one_line(ValueError(" \n")) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) == 200
