"""Colours of lines and structures."""

# Distinguishable with any colour vision, and on white as on near-black (after Okabe and Ito, 2008,
# without yellow and black).
COLOURS = ("#0f7fc4", "#dd8a00", "#0a9b74", "#d4590a", "#c26a9c", "#4aa8d8", "#8a7a2f", "#7a6fd0")

# Truth and prediction of a single structure: orange and sky blue of Okabe and Ito, light enough
# for dark images.
TRUTH = "#e69f00"
PREDICTION = "#56b4e9"


def structure_colours(count: int) -> list[tuple[str, str]]:
    """The colours of truth and prediction of each structure.

    Those of a single structure differ. Each of several has one colour for both: its truth is an
    outline, its prediction is filled.

    Examples:
        >>> structure_colours(1), structure_colours(2)
        ([('#e69f00', '#56b4e9')], [('#0f7fc4', '#0f7fc4'), ('#dd8a00', '#dd8a00')])
    """
    if count == 1:
        return [(TRUTH, PREDICTION)]
    return [(COLOURS[number % len(COLOURS)],) * 2 for number in range(count)]
