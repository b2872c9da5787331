"""Types of the fixtures that several folders share."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from medflare.tasks.config import TaskConfig

# conftest.py: a file of reference numbers by its name.
Golden = Callable[[str], dict[str, np.ndarray]]
TaskOf = Callable[..., TaskConfig]  # picture_sites.make_task
SiteOf = Callable[..., Path]  # picture_sites.make_site
Refused = Callable[..., str]  # cli/conftest.py: the line that a command which fails ends with
Edit = Callable[..., None]  # picture_sites.edit
