"""What the runs of a study have in common."""

from dataclasses import dataclass
from pathlib import Path

from medflare.tasks.config import TaskConfig


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share.

    Attributes:
        sites: their names.
        rounds: federation rounds.
        data_root: folder with a subfolder per site; None: MEDFLARE_DATA_ROOT, else the task's embedded images.
    """

    task: TaskConfig
    sites: tuple[str, ...]
    rounds: int
    data_root: Path | None = None
