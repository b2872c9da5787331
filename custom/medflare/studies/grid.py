"""Studies: rows side by side over seeds and left-out sites. Completed runs are kept, so a study can
be interrupted and extended.

    OUT/table.md
    OUT/study.zip
        study.json                                  the rows in their order
        <row>/seed<seed>[-<outside>]/results.json
        <row>/seed<seed>[-<outside>]/scores.json    scores of single patients; models with equal
                                                    scores name the first of them

Without its scores (`zip -d study.zip '*/scores.json'`) a study can be passed on; tables that need
them are then incomplete.
"""

import json
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import pandas as pd
import torch

from medflare.core.errors import ConfigError, StateError
from medflare.core.store import file_digest, replacing, write_atomically
from medflare.core.text import about
from medflare.data.datalist import FILE
from medflare.data.loading import site_folder
from medflare.evaluation.results import COMPLETED, RESULTS_FILE, json_ready, parse_results
from medflare.federation.settings import CROSS_SITE
from medflare.studies.candidates import Candidate
from medflare.studies.page import PAGE_FILE, study_page
from medflare.studies.references import CONSTANT, SCORES, Setting
from medflare.studies.statistics import Run, sites_of_role
from medflare.studies.tables import TABLE_FILE, StudyTables, study_report
from medflare.tasks.config import load_task

STUDY_FILE: Final = "study.zip"
SCORES_FILE: Final = "scores.json"
_ROWS: Final = "study.json"
_DATALISTS: Final = "datalists"  # setting in a run's results: site -> checksum of its datalist

# -- study.zip -------------------------------------------------------------------------------------


def run_name(label: str, seed: int, outside: Sequence[str] = ()) -> str:
    """The folder of a run in the file.

    Examples:
        >>> run_name("fedsm:lam=0.3", 1, ["CS"])
        'fedsm_lam=0.3/seed1-CS'
    """
    row = re.sub(r"[^\w.=-]", "_", label)
    return "-".join([f"{row}/seed{seed}", *outside])


def write_rows(out: Path, labels: Iterable[str]) -> None:
    """Write the order of the rows; rows of an earlier study in the same folder follow."""
    rows = list(labels)
    rows += [row for row in _rows(_contents(out)) if row not in rows]
    _write(out, {_ROWS: {"rows": rows}})


def write_run(out: Path, name: str, results: Run) -> None:
    """Add or replace a run."""
    content = dict(results)
    scores: dict[str, dict[str, Any]] = {}
    for site, models in content.pop(SCORES, {}).items():
        scores[site] = {}
        for model, cases in models.items():
            equal = [first for first, earlier in scores[site].items() if earlier == cases]
            scores[site][model] = equal[0] if equal else cases
    _write(out, {f"{name}/{RESULTS_FILE}": content, f"{name}/{SCORES_FILE}": scores})


def read_runs(out: Path) -> dict[str, dict[str, Any]]:
    """Name -> results of all runs, with their scores if they were kept; empty without a file.

    Raises StateError if it is damaged.
    """
    contents = _contents(out)
    runs: dict[str, dict[str, Any]] = {}
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


def read_study(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Row -> its runs; rows that study.json does not name are last.

    Raises StateError if there is no run, or the file is damaged.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in read_runs(out).values():
        label = run["configuration"]["settings"].get("label", run["method"])
        groups.setdefault(label, []).append(run)
    if not groups:
        raise StateError(
            f"{out}: no run of a study here; "
            f"name the folder of `medflare study --out` with {STUDY_FILE}"
        )
    labels = dict.fromkeys([*_rows(_contents(out)), *sorted(groups)])
    return {label: groups[label] for label in labels if label in groups}


def _contents(out: Path) -> dict[str, bytes]:
    file = out / STUDY_FILE
    if not file.is_file():
        return {}
    try:
        with ZipFile(file) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (OSError, BadZipFile, zlib.error) as error:
        raise StateError(f"{file}: {error!r}; delete it to run the study again") from error


def _write(out: Path, changes: Mapping[str, Any]) -> None:
    """Replace entries of the file atomically; equal contents give equal bytes."""
    contents = _contents(out)
    for name, content in changes.items():
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        contents[name] = f"{text}\n".encode()
    with replacing(out / STUDY_FILE) as temporary, ZipFile(temporary, "w") as archive:
        for name in sorted(contents):
            entry = ZipInfo(name)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, contents[name], ZIP_DEFLATED, compresslevel=9)


def _rows(contents: Mapping[str, bytes]) -> list[str]:
    if _ROWS not in contents:
        return []
    return list(json.loads(contents[_ROWS])["rows"])


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    setting: Setting
    seed: int
    outside: tuple[str, ...]

    @property
    def name(self) -> str:
        return run_name(self.candidate.label, self.seed, self.outside)

    def __call__(self) -> dict[str, Any]:
        """The results in JSON types: another process can send them."""
        torch.set_num_threads(1)
        results = self.candidate.run(self.setting, self.seed, self.outside)
        results["configuration"]["settings"] |= {
            "label": self.candidate.label,
            "resplit": self.seed,
            _DATALISTS: _datalists(self.setting),
        }
        in_json_types: dict[str, Any] = json_ready(results)
        return in_json_types


def run_study(
    candidates: Sequence[Candidate],
    setting: Setting,
    seeds: Iterable[int],
    out: Path,
    *,
    left_out: Sequence[str] = (),
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[dict[str, Any]]]:
    """Run what has not completed yet, and write study.zip, table.md and study.html.

    Args:
        seeds: each candidate runs with each.
        left_out: each of these sites in turn does not train and gets the final models; none: all
            sites are inside.
        processes: runs at the same time, one thread each.
        say: gets a line for every run that ended.

    Returns:
        Label of a candidate -> its runs.

    Raises:
        ConfigError: the task or a site's name is wrong, a row cannot run, something is named twice,
            or no site is left to train.
        StateError: an earlier run in `out` is damaged, or had other settings.
    """
    seeds = list(seeds)
    labels = [candidate.label for candidate in candidates]
    for what, values in (("row", labels), ("seed", seeds), ("left-out site", left_out)):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:  # the same runs would count as repetitions
            raise ConfigError(f"study: {what} {twice[0]!r} is named twice; name it once")
    if left_out and len(setting.sites) < 2:
        raise ConfigError(
            f"without {setting.sites[0]} no site is left to train; name at least two sites"
        )
    for candidate in candidates:
        candidate.check(setting.task, setting.rounds, left_out)
    splits: list[tuple[str, ...]] = [(site,) for site in left_out] or [()]
    jobs: list[_Job] = []
    for seed in seeds:
        for candidate in candidates:
            jobs += [_Job(candidate, setting, seed, outside) for outside in splits]
    earlier = read_runs(out)
    missing: list[_Job] = []
    for job in jobs:
        run = earlier.get(job.name)
        if run is not None and _is_complete(run, setting):
            _check_same(out, job, run)
        else:
            missing.append(job)
    write_rows(out, labels)
    started = time.monotonic()
    for done, (job, results) in enumerate(_finished(missing, processes), start=1):
        write_run(out, job.name, results)
        left = (time.monotonic() - started) / done * (len(missing) - done)
        seconds = results["seconds"]["total"]
        line = f"[{done}/{len(missing)}] {job.name}: {results['status']}, {seconds:.0f} s"
        if left:
            line += f", about {about(left)} left"
        say(line)
    runs = read_runs(out)
    groups: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        groups.setdefault(job.candidate.label, []).append(runs[job.name])
    study = StudyTables(groups)
    write_atomically(out / TABLE_FILE, study_report(study).encode(), public=True)
    write_atomically(out / PAGE_FILE, study_page(study).encode(), public=True)
    return groups


def _is_complete(run: Run, setting: Setting) -> bool:
    """Runs without the matrix that the setting asks for are repeated."""
    has_matrix = CROSS_SITE in run or run["method"] == CONSTANT
    return run["status"] == COMPLETED and (has_matrix or not setting.cross_site)


def _check_same(out: Path, job: _Job, run: Run) -> None:
    """Raise StateError if a kept run had other settings; a setting that it does not record is not
    compared.
    """
    configuration = run["configuration"]
    setting = job.setting
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
            "sites": sorted(setting.inside(job.outside)),
            "task": load_task(replace(setting.task, resplit=job.seed)).to_dict(),
            **job.candidate.effective,
            "datalist": _datalists(setting),
        }
    )
    then: list[str] = []
    today: list[str] = []
    for name, value in before.items():
        if now.get(name) != value:
            then.append(f"{name} = {value!r}")
            today.append(f"{name} = {now.get(name)!r}")
    if then:
        raise StateError(
            f"{out}: {job.name} is a run with {', '.join(then)}, "
            f"this study has {', '.join(today)}; use another --out"
        )


def _flat(settings: Mapping[str, Any]) -> dict[Any, Any]:
    return dict(pd.json_normalize(json_ready(settings)).to_dict("records")[0])


def _datalists(setting: Setting) -> dict[str, str]:
    """Site -> checksum of its datalist, "" for images embedded in the task."""
    checksums: dict[str, str] = {}
    for site in setting.sites:
        folder = site_folder(site, data_root=setting.data_root)
        checksums[site] = "" if folder is None else file_digest(folder / FILE)[:16]
    return checksums


def _finished(jobs: Sequence[_Job], processes: int) -> Iterator[tuple[_Job, dict[str, Any]]]:
    """Every job with its results, in the order in which they end."""
    if processes <= 1:
        for job in jobs:
            yield job, job()
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        running = {pool.submit(job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:  # after an error or Ctrl-C, jobs that have not started are not started
        pool.shutdown(cancel_futures=True)
