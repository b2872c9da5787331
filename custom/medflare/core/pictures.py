"""Pictures as files."""

from io import BytesIO

import numpy as np


def png(picture: np.ndarray) -> bytes:
    """A picture, uint8 (h, w, 3), as a PNG."""
    from PIL import Image

    buffer = BytesIO()
    # This level is four times as fast as the default, and the file 1 % larger.
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=4)
    return buffer.getvalue()
