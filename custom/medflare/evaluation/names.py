"""The words of results.json, which every module of this room shares: kinds of models, roles of sites, splits, outcomes, files."""

from typing import Final

SCHEMA: Final = 1
MODELS: Final = ("global", "personal", "deployed")
ROLES: Final = ("inside", "outside")
SPLITS: Final = ("train", "validation", "test")
COMPLETED, FAILED = "COMPLETED", "FAILED"
RUNNING: Final = "RUNNING"  # of a report alone: results.json is written at the end
UNKNOWN: Final = "unknown"  # the method or the task of a job that could not be read

FOLDER: Final = "medflare"  # below the server's job folder
RESULTS_FILE, ROUNDS_FILE, REPORT_FILE = "results.json", "metrics.jsonl", "report.html"
