"""Studies: methods side by side over seeds and splits, beside the references that they have to beat.

A study is a grid of plain-loop runs. Every completed run is kept in the study's file and not run again, so a study can be interrupted,
extended and tabulated anew. A run that failed is tried again.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from medflare.core.errors import ConfigError, StateError
from medflare.core.store import file_digest, write_atomically
from medflare.data.datalist import FILE
from medflare.data.loading import site_folder
from medflare.evaluation.results import COMPLETED, json_ready
from medflare.studies.archive import Groups, read_runs, run_name, write_rows, write_run
from medflare.studies.candidates import Candidate
from medflare.studies.setting import Setting
from medflare.studies.tables.report import TABLE_FILE, study_report
from medflare.tasks.config import load_task

IMAGES: Final = "datalists"  # setting in a run's results: what its images were, see `_images`


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    setting: Setting
    seed: int
    outside: tuple[str, ...]

    @property
    def name(self) -> str:
        return run_name(self.candidate.label, self.seed, self.outside)

    @property
    def title(self) -> str:
        """The run in a line of what the study says."""
        left_out = f" without {', '.join(self.outside)}" if self.outside else ""
        return f"{self.candidate.label}{left_out}, seed {self.seed}"

    def __call__(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        results = self.candidate.run(self.setting, self.seed, self.outside)
        own = {"label": self.candidate.label, "resplit": self.seed, IMAGES: _images(self.setting)}
        results["configuration"]["settings"] |= own
        return results


def run_study(
    candidates: Sequence[Candidate],
    setting: Setting,
    seeds: Iterable[int],
    out: Path,
    *,
    left_out: Sequence[str] = (),
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Groups:
    """Run what has not completed yet and tabulate everything.

    Args:
        seeds: every candidate runs with each.
        out: folder for the file of all runs (`archive`), and for table.md (`study_report`).
        left_out: each of these sites in turn is outside (it never trains and receives the final models); none: all are inside.
        processes: runs at the same time, one thread each.
        say: takes a line for every run that ended.

    Returns:
        Label of a candidate -> results of all its runs.

    Raises:
        ConfigError: the task or a site's name is wrong, a row cannot have the task or the rounds, something is given twice, or there is
            nobody left to train.
        StateError: an earlier run in `out` is damaged, or it is another than this study's.
    """
    seeds = list(seeds)
    for what, given in (("row", [row.label for row in candidates]), ("seed", seeds), ("left-out site", left_out)):
        _refuse_twice(what, given)
    if left_out and len(setting.sites) < 2:
        raise ConfigError(f"leaving out {', '.join(setting.sites)} leaves nobody to train; name at least two sites")
    for candidate in candidates:
        candidate.check(setting.task, setting.rounds, left_out)
    splits: list[tuple[str, ...]] = [(site,) for site in left_out] or [()]
    jobs = [_Job(candidate, setting, seed, outside) for seed in seeds for candidate in candidates for outside in splits]
    runs = _completed(out, jobs, say)
    write_rows(out, (candidate.label for candidate in candidates))
    missing = [job for job in jobs if job.name not in runs]
    for done, (job, results) in enumerate(_finished(missing, processes), start=1):
        write_run(out, job.name, results)
        say(f"[{done}/{len(missing)}] {job.title}: {results['status']}, {results['seconds']['total']:.0f} s")
    runs = read_runs(out)
    groups: Groups = {}
    for job in jobs:
        groups.setdefault(job.candidate.label, []).append(runs[job.name])
    write_atomically(out / TABLE_FILE, study_report(groups).encode(), public=True)
    return groups


def _refuse_twice(what: str, given: Sequence[Hashable]) -> None:
    """ConfigError where something is given twice: the same runs would count as repetitions."""
    if twice := [name for name, times in Counter(given).items() if times > 1]:
        raise ConfigError(f"study: {what} {twice[0]!r} is given twice, which would count one run as two; give it once")


# -- runs of earlier calls -------------------------------------------------------------------------------------------------


def _completed(out: Path, jobs: Sequence[_Job], say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Name -> results of the runs that completed earlier.

    Raises:
        StateError: one is damaged, or it is not the run that is asked for.
    """
    kept = read_runs(out)
    found = [(job, kept[job.name]) for job in jobs if job.name in kept]
    completed = {job.name: run for job, run in found if run["status"] == COMPLETED}
    for job, run in found:
        if job.name in completed:
            _refuse_another(out, job, run)
    for job, run in found:
        if job.name not in completed:
            say(f"{job.title} had failed and is run again: {run['reason']}")
    return completed


def _refuse_another(out: Path, job: _Job, run: Mapping[str, Any]) -> None:
    """StateError where a kept run had another task, images, sites, rounds or hyper-parameters; what it does not name cannot be told."""
    then, now = _had(run), _asked(job)
    if other := [name for name, value in then.items() if now.get(name) != value]:
        was, is_now = (", ".join(f"{name} = {of.get(name)!r}" for name in other) for of in (then, now))
        raise StateError(f"{out}: {job.name} is a run with {was}, this study has {is_now}; give another --out")


def _asked(job: _Job) -> dict[str, Any]:
    """What decides a run's numbers, by name, as this study has it."""
    task = load_task(replace(job.setting.task, resplit=job.seed))
    inside = [site for site in job.setting.sites if site not in job.outside]
    return _named(inside, job.setting.rounds, task.to_dict(), job.candidate.effective) | _by_site(_images(job.setting))


def _had(run: Mapping[str, Any]) -> dict[str, Any]:
    """The same as a run says that it had it, its task with all settings that there are now."""
    configuration = run["configuration"]
    try:
        task = load_task(configuration["task"]).to_dict()
    except ConfigError:  # an earlier version had other settings
        task = configuration["task"]
    inside = [name for name, site in run["sites"].items() if site["role"] == "inside"]
    return _named(inside, run["rounds"], task, configuration["hyper"]) | _by_site(configuration["settings"].get(IMAGES, {}))


def _images(setting: Setting) -> dict[str, str]:
    """Site -> the checksum of its datalist, which stays the same where data move; "" where its images are embedded in the task."""
    folders = {site: site_folder(site, data_root=setting.data_root) for site in setting.sites}
    return {site: "" if folder is None else file_digest(folder / FILE)[:16] for site, folder in folders.items()}


def _by_site(images: Mapping[str, str]) -> dict[str, str]:
    return {f"datalist of {site}": digest for site, digest in images.items()}


def _named(inside: Sequence[str], rounds: int, task: Mapping[str, Any], hyper: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    algorithms = {f"{algorithm}.{name}": value for algorithm, values in hyper.items() for name, value in values.items()}
    learnt = {f"task.{name}": value for name, value in task.items()}
    return dict(json_ready({"rounds": rounds, "sites": sorted(inside), **learnt, **algorithms}))


# -- runs of this one ------------------------------------------------------------------------------------------------------


def _finished(jobs: Sequence[_Job], processes: int) -> Iterable[tuple[_Job, dict[str, Any]]]:
    """Every job with its results, as they end."""
    if processes <= 1:
        yield from ((job, job()) for job in jobs)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        running = {pool.submit(job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:  # also on Ctrl-C: what has not begun must not hold up the reason
        pool.shutdown(cancel_futures=True)
