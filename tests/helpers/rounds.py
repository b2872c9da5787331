"""The rounds of a run, as its metrics.jsonl has them."""

import json
from pathlib import Path
from typing import Any

from medflare.evaluation.results import ROUNDS_FILE


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without damaged ones."""
    path = folder / ROUNDS_FILE
    if not path.exists():
        return []
    steps = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):  # the rest of a damaged line can be a number
            steps.append(line)
    return steps
