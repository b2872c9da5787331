"""A study in one file, small enough to be committed, from which the tables can be made again.

    OUT/table.md
    OUT/study.zip
        study.json                                  the rows in their order
        <row>/seed<seed>[-<outside>]/results.json
        <row>/seed<seed>[-<outside>]/scores.json    the scores of single patients, under their names

Without its scores (`zip -d study.zip '*/scores.json'`) a study can be handed on; the tables then lack what needs them. Of a site's models
with equal scores one has them, and the others name it.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from medflare.core.errors import StateError
from medflare.core.store import replacing
from medflare.evaluation.results import RESULTS_FILE, validate_results
from medflare.studies.references import CURVES, SCORES

STUDY_FILE: Final = "study.zip"
SCORES_FILE: Final = "scores.json"
_ROWS: Final = "study.json"
Groups: TypeAlias = dict[str, list[dict[str, Any]]]  # row -> results of all its runs


def run_name(label: str, seed: int, outside: Sequence[str] = ()) -> str:
    """The folder of a run in the file.

    Args:
        outside: sites that did not train.

    Examples:
        >>> run_name("fedsm:lam=0.3", 1, ["CS"])
        'fedsm_lam=0.3/seed1-CS'
    """
    row = "".join(sign if sign.isalnum() or sign in "-_.=" else "_" for sign in label)
    return f"{row}/{'-'.join([f'seed{seed}', *outside])}"


def write_rows(out: Path, labels: Iterable[str]) -> None:
    """Write the rows in their order, followed by those of an earlier study in the same folder that are not among them."""
    rows = list(labels)
    earlier = [row for row in _rows(_contents(out)) if row not in rows]
    _write(out, {_ROWS: _compact({"rows": rows + earlier})})


def write_run(out: Path, name: str, results: Mapping[str, Any]) -> None:
    """Add a run to the file, in the place of an earlier one of that name.

    Of model_selection the rounds are kept: the votes are the points of the learning curves.
    """
    scores = {site: _once(models) for site, models in results.get(SCORES, {}).items()}
    kept = {key: content for key, content in results.items() if key != SCORES}
    if "model_selection" in kept and CURVES in kept:
        kept["model_selection"] = {model: {"round": election["round"]} for model, election in kept["model_selection"].items()}
    _write(out, {f"{name}/{RESULTS_FILE}": _compact(kept), f"{name}/{SCORES_FILE}": _compact(scores)})


def read_runs(out: Path) -> dict[str, dict[str, Any]]:
    """Name -> results of all runs in the file, with their scores where they were kept; none where there is no file.

    Raises:
        StateError: the file is damaged.
    """
    contents, runs = _contents(out), {}
    for entry in sorted(entry for entry in contents if entry.endswith(f"/{RESULTS_FILE}")):
        name = entry.removesuffix(f"/{RESULTS_FILE}")
        try:
            validate_results(results := json.loads(contents[entry]))
            if scores := contents.get(f"{name}/{SCORES_FILE}"):
                results[SCORES] = {site: _everywhere(models) for site, models in json.loads(scores).items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise StateError(f"{out / STUDY_FILE}: {name}: {error}; delete that run (zip -d) to run it again") from error
        runs[name] = results
    return runs


def read_study(out: Path) -> Groups:
    """All runs of a study, row by row; rows that study.json does not name come last, by their names.

    Raises:
        StateError: the study has no run, or is damaged.
    """
    groups: Groups = {}
    for run in read_runs(out).values():
        groups.setdefault(run["configuration"]["settings"].get("label", run["method"]), []).append(run)
    if not groups:
        raise StateError(f"{out}: no run of a study here; name the folder that `medflare study --out` wrote ({STUDY_FILE})")
    order = _rows(_contents(out))
    return dict(sorted(groups.items(), key=lambda row: (order.index(row[0]) if row[0] in order else len(order), row[0])))


def _contents(out: Path) -> dict[str, bytes]:
    file = out / STUDY_FILE
    if not file.is_file():
        return {}
    try:
        with ZipFile(file) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (OSError, BadZipFile, zlib.error) as error:
        raise StateError(f"{file}: {error!r}; delete it to run the study again") from error


def _write(out: Path, changed: Mapping[str, bytes]) -> None:
    """Write entries of the file, in one step; the same contents give the same bytes."""
    contents = {**_contents(out), **changed}
    with replacing(out / STUDY_FILE) as temporary, ZipFile(temporary, "w") as archive:
        for name in sorted(contents):
            entry = ZipInfo(name)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, contents[name], ZIP_DEFLATED, compresslevel=9)


def _rows(contents: Mapping[str, bytes]) -> list[str]:
    return list(json.loads(contents[_ROWS])["rows"]) if _ROWS in contents else []


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
