"""A study on disk: a folder for every run, small enough to be committed, from which the tables can be made again.

    OUT/study.json                            the rows in their order
    OUT/<row>/seed<seed>[-<outside>]/results.json, scores.json.gz
    OUT/table.md

scores.json.gz holds what single patients scored, under their names. It is read where it is there; without it the tables lack what needs
it. A study whose patients nobody may name is handed on without. Of a site's models that score alike one has its scores, and the others name
it.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from medflare.core.errors import StateError
from medflare.core.store import write_atomically, write_json
from medflare.evaluation.results import RESULTS_FILE, load_results
from medflare.studies.recorded import CURVES, SCORES

STUDY_FILE: Final = "study.json"
SCORES_FILE: Final = "scores.json.gz"
Groups: TypeAlias = dict[str, list[dict[str, Any]]]  # row -> results of all its runs


def run_folder(out: Path, label: str, seed: int, outside: Sequence[str] = ()) -> Path:
    """Where a run lies.

    Args:
        out: the study's folder.
        label: the row.
        seed: of the run.
        outside: sites that did not train.
    """
    row = "".join(sign if sign.isalnum() or sign in "-_.=" else "_" for sign in label)
    return out / row / "-".join([f"seed{seed}", *outside])


def write_rows(out: Path, labels: Iterable[str]) -> None:
    """Write down the rows in their order, after those of an earlier study in the same folder that are not among them."""
    rows = list(labels)
    earlier = [row for row in _rows(out) if row not in rows]
    write_json(out / STUDY_FILE, {"rows": rows + earlier}, public=True)


def write_run(folder: Path, results: Mapping[str, Any]) -> None:
    """Write a run: the scores of single patients first, apart from the results, which alone say that the run is there.

    Of elections the rounds are kept: the votes are the points of the learning curves.
    """
    scores = _compact({site: _once(models) for site, models in results.get(SCORES, {}).items()})
    write_atomically(folder / SCORES_FILE, gzip.compress(scores, mtime=0))  # the same scores, the same bytes
    kept = {name: content for name, content in results.items() if name != SCORES}
    if "elections" in kept and CURVES in kept:
        kept["elections"] = {model: {"round": election["round"]} for model, election in kept["elections"].items()}
    write_atomically(folder / RESULTS_FILE, _compact(kept), public=True)


def _compact(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _once(models: Mapping[str, Any]) -> dict[str, Any]:
    """A site's scores, model -> scores, or the name of an earlier model with the same."""
    kept: dict[str, Any] = {}
    for model, scores in models.items():
        kept[model] = next((earlier for earlier, found in kept.items() if found == scores), scores)
    return kept


def _everywhere(models: Mapping[str, Any]) -> dict[str, Any]:
    """What `_once` was given."""
    return {model: models[scores] if isinstance(scores, str) else scores for model, scores in models.items()}


def is_finished(folder: Path) -> bool:
    """Whether a run lies there, completed or failed."""
    return (folder / RESULTS_FILE).is_file()


def read_run(folder: Path) -> dict[str, Any]:
    """The results dict of a run, with its scores where they were kept.

    Raises:
        StateError: there is none, or it is damaged.
    """
    results, file = load_results(folder / RESULTS_FILE), folder / SCORES_FILE
    if not file.is_file():
        return results
    try:
        return results | {SCORES: {site: _everywhere(models) for site, models in json.loads(gzip.decompress(file.read_bytes())).items()}}
    except (OSError, EOFError, zlib.error, ValueError, KeyError, AttributeError) as error:
        raise StateError(f"{file}: {error!r}; delete it to do without, or the run's folder to run it again") from error


def read_study(out: Path) -> Groups:
    """All runs of a study, row by row; rows that study.json does not name come last, by their names.

    Args:
        out: the study's folder.

    Raises:
        StateError: no run lies there, or one is damaged.
    """
    runs = [read_run(file.parent) for file in sorted(out.glob(f"*/*/{RESULTS_FILE}"))]
    if not runs:
        raise StateError(f"{out}: no run of a study here (no */*/{RESULTS_FILE}); name the folder that `medflare study --out` wrote")
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run["configuration"]["settings"].get("label", run["method"]), []).append(run)
    order = _rows(out)
    return {
        label: groups[label] for label in sorted(groups, key=lambda label: (order.index(label) if label in order else len(order), label))
    }


def _rows(out: Path) -> list[str]:
    file = out / STUDY_FILE
    if not file.is_file():
        return []
    try:
        return [str(row) for row in json.loads(file.read_bytes())["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{file}: {error!r}; delete it to have the rows sorted by name") from error
