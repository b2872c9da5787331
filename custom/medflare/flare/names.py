"""Names that parties agree on: a job's files, and the actions in audit.log."""

import re

JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # FLARE's
# Environment variable: the caller of the simulator prints the results, the server's log need not.
NO_TABLE = "_MEDFLARE_NO_TABLE"
TASK_FILE = "task.json"  # in the job's config folder

# Actions in a party's audit.log, see `components`.
REFUSED = "medflare.component.refused"
BUILT = "medflare.component.built"
