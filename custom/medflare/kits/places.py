"""Where things lie in a startup kit: names that the commands of a kit and FLARE's components share. Light to import."""

from typing import Final

LOCAL_FILE: Final = "medflare.json"  # in the site's local/ folder: see data.sites.local.LocalSettings
FOLDER: Final = "medflare"  # below the job's folder: a site's state and models, the server's results
CACHE: Final = "medflare-cache"  # folder beside local/: decoded images, for all jobs of the site
OUTBOUND: Final = "outbound.csv"  # in the site's folder of the job: what left, entry by entry
PROGRESS: Final = "status.json"  # beside it: the step at hand, or the last one
