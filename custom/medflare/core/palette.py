"""Colours of lines and structures."""

from typing import Final

# Distinguishable with any colour vision, and on white as on near-black (after Okabe and Ito, 2008, without yellow and black).
COLOURS: Final = ("#0f7fc4", "#dd8a00", "#0a9b74", "#d4590a", "#c26a9c", "#4aa8d8", "#8a7a2f", "#7a6fd0")


def rgb(number: int) -> tuple[int, int, int]:
    """The colour of a structure by its number, 0 to 255 each.

    Examples:
        >>> rgb(0), rgb(8) == rgb(0)
        ((15, 127, 196), True)
    """
    code = COLOURS[number % len(COLOURS)]
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)
