"""Names that parties agree on: a job's files, and the actions in audit.log."""

from typing import Final

TASK_FILE: Final = "task.json"  # in the job's config folder

# Actions in a party's audit.log, see `components`.
REFUSED: Final = "medflare.component.refused"
BUILT: Final = "medflare.component.built"
