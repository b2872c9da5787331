"""Studies: rows side by side over seeds and left-out sites. Completed runs are saved, so a study
can be interrupted and extended.

    OUT/table.md
    OUT/study.zip
        study.json                                  the rows in their order, and what grids tried
        <row>/seed<seed>[-<outside>]/results.json
        <row>/seed<seed>[-<outside>]/scores.json    scores of single patients; models with equal
                                                    scores name the first of them

Without its scores (`zip -d study.zip '*/scores.json'`) a study can be passed on; tables that need
them are then incomplete.
"""

import json
import os
import re
import shlex
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import pandas as pd
import torch

from medflare.core.errors import ERRORS, ConfigError, StateError
from medflare.core.files import (
    file_digest,
    locked,
    refuse_bomb,
    refuse_link,
    replacing,
    write_atomically,
)
from medflare.core.packages import CODE
from medflare.core.text import Json, JsonDict, Say, format_seconds
from medflare.data.datalist import FILE
from medflare.data.loading import site_folder
from medflare.evaluation.presentation import sites_of_role
from medflare.evaluation.results import COMPLETED, FAILED, RESULTS_FILE, json_ready, parse_results
from medflare.federation.settings import CROSS_SITE
from medflare.studies import cluster as clusters
from medflare.studies.candidates import Candidate
from medflare.studies.costs import with_costs
from medflare.studies.grid import TRIED, selected, tried
from medflare.studies.page import PAGE_FILE, study_page
from medflare.studies.references import CONSTANT, SCORES, Draw, Setting
from medflare.studies.report import TABLE_FILE, study_report
from medflare.studies.statistics import Results
from medflare.studies.tables import StudyTables
from medflare.tasks.config import load_task

STUDY_FILE = "study.zip"
SCORES_FILE = "scores.json"
_ROWS = "study.json"
_MEDFLARE_CODE = f"medflare{CODE}"
_LOCK = ".study.lock"
_DATALISTS = "datalists"  # setting in a run's results: site -> checksum of its datalist

# -- study.zip -------------------------------------------------------------------------------------


def run_name(row: str, seed: int, outside: Sequence[str] = ()) -> str:
    """The folder of a run in the file.

    Examples:
        >>> run_name("fedsm:lam=0.3", 1, ["CS"])
        'fedsm_lam=0.3/seed1-CS'
    """
    folder = re.sub(r"[^\w.=-]", "_", row)
    return "-".join([f"{folder}/seed{seed}", *outside])


def write_rows(out: Path, rows: Iterable[str], grids: Mapping[str, Iterable[str]]) -> None:
    """Write the order of the rows, and the rows that were tried for one; those of an earlier
    study in the same folder follow.
    """
    with _locked(out) as contents:
        before = _rows(contents)
        content: JsonDict = {"rows": list(dict.fromkeys([*rows, *before["rows"]]))}
        merged = dict(before["grids"])
        for row, tries in grids.items():
            merged[row] = list(dict.fromkeys([*tries, *merged.get(row, ())]))
        if merged:
            content["grids"] = merged
        _write(out, contents, {_ROWS: content})


def write_run(out: Path, name: str, results: Results) -> None:
    """Add or replace a run."""
    content = dict(results)
    scores: dict[str, JsonDict] = {}
    for site, models in content.pop(SCORES, {}).items():
        scores[site] = {}
        for model, cases in models.items():
            equal = (first for first, earlier in scores[site].items() if earlier == cases)
            scores[site][model] = next(equal, cases)
    with _locked(out) as contents:
        changes = {f"{name}/{RESULTS_FILE}": content, f"{name}/{SCORES_FILE}": scores}
        _write(out, contents, changes)


def read_runs(out: Path) -> dict[str, JsonDict]:
    """Name -> results of all runs, with their scores if they were saved; empty without a file.

    Raises:
        StateError: the file is damaged.
    """
    contents = _contents(out)
    runs = {}
    for entry in sorted(contents):
        if not entry.endswith(f"/{RESULTS_FILE}"):
            continue
        name = entry.removesuffix(f"/{RESULTS_FILE}")
        try:
            results = parse_results(contents[entry])
            scores = json.loads(contents.get(f"{name}/{SCORES_FILE}", "{}"))
            for models in scores.values():
                for model, cases in models.items():
                    if isinstance(cases, str):
                        models[model] = models[cases]
        except (ValueError, KeyError, AttributeError) as error:
            raise StateError(
                f"{out / STUDY_FILE}: {name}: {error}; delete that run (zip -d) to run it again"
            ) from error
        if scores:
            results[SCORES] = scores
        runs[name] = results
    return runs


def read_study(out: Path) -> dict[str, list[JsonDict]]:
    """Row -> its runs, of a grid the selected row; rows that study.json does not name are last.

    Raises:
        StateError: there is no run, or the file is damaged.
    """
    groups = _all_groups(out)
    content = _rows(_contents(out))
    grids = content["grids"]
    rows = []
    for row in content["rows"]:
        if row in grids:
            rows.append(selected(grids[row], groups))
        rows.append(row)
    rows += sorted(set(groups).difference(*grids.values()))
    return {row: groups[row] for row in dict.fromkeys(rows) if row in groups}


def study_tables(out: Path, metrics: Sequence[str] = ()) -> StudyTables:
    """The tables of all rows in a study's folder, and of what grids tried; errors as `read_study`
    and `StudyTables`.
    """
    grids = _rows(_contents(out))["grids"]
    further = {TRIED: tried(grids, _all_groups(out))} if grids else {}
    return StudyTables(read_study(out), metrics, further)


def _all_groups(out: Path) -> dict[str, list[JsonDict]]:
    groups = defaultdict(list)
    for run in read_runs(out).values():
        groups[_row_of(run)].append(run)
    if not groups:
        raise StateError(
            f"{out}: no run of a study here; "
            f"name the folder of `medflare study --out` with {STUDY_FILE}"
        )
    return groups


def _row_of(run: Results) -> str:
    return run["configuration"]["settings"].get("label", run["method"])


def _contents(out: Path) -> dict[str, bytes]:
    file = out / STUDY_FILE
    if not file.is_file():
        return {}
    try:
        with ZipFile(file) as archive:
            refuse_bomb(archive)
            return {name: archive.read(name) for name in archive.namelist()}
    except (OSError, ValueError, BadZipFile, zlib.error) as error:
        raise StateError(f"{file}: {error!r}; delete it to run the study again") from error


@contextmanager
def _locked(out: Path) -> Iterator[dict[str, bytes]]:
    """The contents of the file, which another study does not change during the block."""
    with locked(out / _LOCK):
        yield _contents(out)


def _write(out: Path, contents: dict[str, bytes], changes: Json) -> None:
    """Replace entries of the file atomically; equal contents give equal bytes."""
    for name, content in changes.items():
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        contents[name] = f"{text}\n".encode()
    with replacing(out / STUDY_FILE) as temporary, ZipFile(temporary, "w") as archive:
        for name in sorted(contents):
            entry = ZipInfo(name)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, contents[name], ZIP_DEFLATED, compresslevel=9)


def _rows(contents: Mapping[str, bytes]) -> JsonDict:
    """The content of study.json."""
    return {"rows": [], "grids": {}, **json.loads(contents.get(_ROWS, "{}"))}


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    draw: Draw
    errors: Path  # file of tracebacks

    @property
    def name(self) -> str:
        return run_name(self.candidate.row, self.draw.seed, self.draw.outside)

    def __call__(self) -> JsonDict:
        """The results in JSON types: another process can send them. Any error fails this run."""
        torch.set_num_threads(1)
        versions = self.versions  # before the code can change
        try:
            results = with_costs(partial(self.candidate.run, self.draw))
        except Exception as error:
            with self.errors.open("a", encoding="utf-8") as file:
                file.write(f"{self.name}\n{traceback.format_exc()}")
            return self.failed(error)
        results["versions"] |= versions
        return self._with_settings(results)

    @property
    def versions(self) -> dict[str, str]:
        return self.candidate.versions(self.draw.setting.task)

    def failed(self, error: Exception) -> JsonDict:
        """The results of the run that ended with an error."""
        return self._with_settings(self.candidate.failed(self.draw, error))

    def ended(self, results: JsonDict, left: float) -> str:
        """A line about a run that ended; `left`: seconds until all end."""
        line = f"{self.name}: {results['status']}, {results['seconds']['total']:.0f} s"
        if left:
            line += f", about {format_seconds(left)} left"
        if results["status"] == FAILED:
            line += f"; {results['reason']} (tracebacks: {self.errors})"
        return line

    def _with_settings(self, results: JsonDict) -> JsonDict:
        results["configuration"]["settings"] |= {
            "label": self.candidate.row,
            "resplit": self.draw.seed,
            _DATALISTS: _datalists(self.draw.setting),
        }
        return json_ready(results)


def run_study(
    candidates: Sequence[Candidate],
    setting: Setting,
    seeds: Sequence[int],
    out: Path,
    *,
    left_out: Sequence[str] = (),
    grids: Mapping[str, Sequence[Candidate]] | None = None,
    rerun: Sequence[str] = (),
    processes: int = 1,
    cluster: str | None = None,
    say: Say = lambda line: None,
) -> dict[str, list[JsonDict]]:
    """Run what has not completed yet, and write study.zip, and table.md and study.html of all rows
    in the folder. A run that fails does not stop the others.

    Args:
        seeds: each candidate runs with each.
        left_out: each of these sites in turn does not train and gets the final models; none: all
            sites are inside.
        grids: row of a candidate -> those that are run in its place, see `grid`.
        rerun: rows of which every run, also with other seeds, is run again.
        processes: runs at the same time, one thread each.
        cluster: where they run, see `cluster.executor_of`; None: here.
        say: gets a line for every run that ended.

    Returns:
        Row of a candidate, or of each one in its place -> its runs.

    Raises:
        ConfigError: the task or a site's name is wrong, a row cannot run, something is named twice,
            or no site is left to train.
        StateError: an earlier run in `out` is damaged, or had other settings, or its row other
            code; or a link is in `out`.
    """
    for name in (_LOCK, ERRORS, clusters.FOLDER):  # what is not written by replacing it
        refuse_link(out / name, out)
    _check_named_once(candidates, seeds, left_out)
    if left_out and len(setting.sites) < 2:
        raise ConfigError(
            f"without {setting.sites[0]} no site is left to train; name at least two sites"
        )
    grids = grids or {}
    rows = {}  # row -> rows that are run in its place
    cells: dict[str, Candidate] = {}
    for candidate in candidates:
        row_cells = {cell.row: cell for cell in grids.get(candidate.row, [candidate])}
        rows[candidate.row] = list(row_cells)
        cells |= row_cells
    for candidate in cells.values():
        candidate.check(setting.task, setting.rounds, left_out)
    splits: list[tuple[str, ...]] = [(site,) for site in left_out] or [()]
    jobs: dict[str, _Job] = {}
    for seed, candidate, outside in product(seeds, cells.values(), splits):
        job = _Job(candidate, Draw(setting, seed, outside), out / ERRORS)
        other = jobs.setdefault(job.name, job)
        if other is not job:
            raise ConfigError(
                f"study: rows {other.candidate.row!r} and {candidate.row!r} would have one "
                f"place in {STUDY_FILE}; give one of them a study of its own"
            )
    repeated = set()
    for row in rerun:
        if row not in rows and row not in cells:
            raise ConfigError(f"--rerun {row}: no row of this study; name it as a row, too")
        repeated.update(rows.get(row, [row]))
    missing = _missing(out, jobs, cells, setting, repeated, say)
    executor = None
    if cluster is not None and missing:
        executor = clusters.executor_of(cluster, out / clusters.FOLDER, processes)
    write_rows(out, rows, {row: rows[row] for row in grids})
    started = time.monotonic()
    for done, (job, results) in enumerate(_finished(missing, processes, executor), start=1):
        write_run(out, job.name, results)
        left = (time.monotonic() - started) / done * (len(missing) - done)
        say(f"[{done}/{len(missing)}] {job.ended(results, left)}")
    runs = read_runs(out)
    groups = defaultdict(list)
    for name, job in jobs.items():
        groups[job.candidate.row].append(runs[name])
    study = study_tables(out)
    write_atomically(out / TABLE_FILE, study_report(study).encode(), public=True)
    write_atomically(out / PAGE_FILE, study_page(study).encode(), public=True)
    return groups


def _check_named_once(
    candidates: Sequence[Candidate], seeds: Sequence[int], left_out: Sequence[str]
) -> None:
    """Raise ConfigError if something is named twice: the same runs would count as repetitions."""
    rows = [candidate.row for candidate in candidates]
    for what, values in (("row", rows), ("seed", seeds), ("left-out site", left_out)):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise ConfigError(f"study: {what} {twice[0]!r} is named twice; name it once")


def _missing(
    out: Path,
    jobs: Mapping[str, _Job],
    cells: Mapping[str, Candidate],
    setting: Setting,
    repeated: Container[str],
    say: Say,
) -> list[_Job]:
    """The jobs without a saved run, and all jobs of repeated rows, also with other seeds.

    `say` gets a warning of other code of medflare.

    Raises:
        StateError: a saved run had other settings, or its row other code.
    """
    earlier = read_runs(out)
    missing = []
    # Row -> how its code differs: that of medflare, and any other.
    older: dict[str, str] = {}
    stale: dict[str, str] = {}
    for name, job in {**_other_jobs(out, earlier, cells, setting), **jobs}.items():
        run = earlier.get(name)
        if job.candidate.row in repeated:
            missing.append(job)
        elif run is not None and _is_complete(run, setting):
            _check_same(out, job, run)
            for package, difference in _other_code(job, run).items():
                rows = older if package == _MEDFLARE_CODE else stale
                rows.setdefault(job.candidate.row, difference)
        elif name in jobs:
            missing.append(job)
    if stale:
        again = " ".join(f"--rerun {shlex.quote(row)}" for row in stale)
        raise StateError(
            f"{out}: rows with runs of other code: {', '.join(stale)} "
            f"({next(iter(stale.values()))}); run them again with {again}, or use another --out"
        )
    if older:
        say(
            f"warning: kept runs of {', '.join(older)} are of other code of medflare; "
            "--rerun ROW runs them again"
        )
    return missing


def _other_jobs(
    out: Path, earlier: Mapping[str, Results], cells: Mapping[str, Candidate], setting: Setting
) -> dict[str, _Job]:
    """Name -> job of every earlier run of these rows."""
    jobs = {}
    for name, run in earlier.items():
        row = _row_of(run)
        if row in cells:
            site = name.removeprefix(run_name(row, run["seed"])).removeprefix("-")
            draw = Draw(setting, run["seed"], (site,) if site else ())
            jobs[name] = _Job(cells[row], draw, out / ERRORS)
    return jobs


def _other_code(job: _Job, run: Results) -> dict[str, str]:
    """Version or code -> how that of a saved run differs from that here; empty for a run of an
    earlier version of medflare, which does not record code.
    """
    before = run["versions"]
    differences = {}
    if _MEDFLARE_CODE in before:
        for name, value in job.versions.items():
            if before.get(name, value) != value:
                here = f"here is {value}"
                differences[name] = f"{job.name} is a run with {name} {before[name]}, {here}"
    return differences


def _is_complete(run: Results, setting: Setting) -> bool:
    """Whether a saved run is complete, with the matrix that the setting asks for; others are
    repeated.
    """
    has_matrix = CROSS_SITE in run or run["method"] == CONSTANT
    return run["status"] == COMPLETED and (has_matrix or not setting.cross_site)


def _check_same(out: Path, job: _Job, run: Results) -> None:
    """Raise StateError if a saved run had other settings; a setting that it does not record is not
    compared.
    """
    configuration = run["configuration"]
    setting = job.draw.setting
    try:
        task = load_task(configuration["task"]).to_dict()
    except ConfigError:  # the settings of an earlier version
        task = configuration["task"]
    before = _flat(
        {
            "rounds": run["rounds"],
            "sites": sites_of_role(run, "inside"),
            "task": task,
            **configuration["hyper"],
            "datalist": configuration["settings"].get(_DATALISTS, {}),
        }
    )
    now = _flat(
        {
            "rounds": setting.rounds,
            "sites": sorted(job.draw.inside),
            "task": load_task(job.draw.task).to_dict(),
            **job.candidate.effective,
            "datalist": _datalists(setting),
        }
    )
    changed = [name for name, value in before.items() if now.get(name) != value]
    if changed:
        then = ", ".join(f"{name} = {before[name]!r}" for name in changed)
        today = ", ".join(f"{name} = {now.get(name)!r}" for name in changed)
        raise StateError(
            f"{out}: {job.name} is a run with {then}, this study has {today}; use another --out"
        )


def _flat(settings: Json) -> dict[Any, Any]:
    return pd.json_normalize(json_ready(settings)).to_dict("records")[0]


def _datalists(setting: Setting) -> dict[str, str]:
    """Site -> checksum of its datalist, "" for images embedded in the task."""
    checksums = {}
    for site in setting.sites:
        folder = site_folder(site)
        checksums[site] = "" if folder is None else file_digest(folder / FILE)[:16]
    return checksums


def _finished(
    jobs: Sequence[_Job], processes: int, executor: Any = None
) -> Iterator[tuple[_Job, JsonDict]]:
    """Every job with its results, in the order in which they end."""
    for job, result in _ended(jobs, processes, executor):
        try:
            results = result()
        except Exception as error:  # its process ended, or cannot send its results
            results = job.failed(error)
        yield job, results


def _ended(
    jobs: Sequence[_Job], processes: int, executor: Any
) -> Iterator[tuple[_Job, Callable[[], JsonDict]]]:
    if executor is not None:
        yield from clusters.finished_jobs(executor, jobs)
        return
    if processes <= 1:
        for job in jobs:
            yield job, job
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        running = {pool.submit(job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result
    except BaseException:  # an error or Ctrl-C: no job goes on
        for process in (pool._processes or {}).values():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
