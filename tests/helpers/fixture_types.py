"""Types of the fixtures that several folders share."""

from collections.abc import Callable

import numpy as np

Golden = Callable[[str], dict[str, np.ndarray]]  # conftest.py: a file of reference numbers by its name
