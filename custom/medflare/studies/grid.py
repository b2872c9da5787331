"""Studies: methods side by side over seeds and splits, beside the references that they have to beat.

A study is a grid of plain-loop runs. Every finished run is kept under the study's folder and not run again, so a study can be
interrupted, extended and tabulated anew.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from medflare.core.errors import ConfigError
from medflare.core.store import write_atomically
from medflare.studies.archive import Groups, is_finished, read_run, run_folder, write_rows, write_run
from medflare.studies.candidates import Candidate
from medflare.studies.setting import Setting
from medflare.studies.tables.report import TABLE_FILE, study_report


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    setting: Setting
    seed: int
    outside: tuple[str, ...]
    folder: Path

    def __call__(self) -> str:
        torch.set_num_threads(1)
        results = self.candidate.run(self.setting, self.seed, self.outside)
        results["configuration"]["settings"] |= {"label": self.candidate.label, "resplit": self.seed}
        write_run(self.folder, results)
        left_out = f" without {', '.join(self.outside)}" if self.outside else ""
        return f"{self.candidate.label}{left_out}, seed {self.seed}: {results['status']}, {results['seconds']['total']:.0f} s"


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
    """Run what is not there yet and tabulate everything.

    Args:
        candidates: the rows.
        setting: task, sites, data and rounds.
        seeds: every candidate runs with each.
        out: folder for every run (`archive`), and for table.md (`study_report`).
        left_out: each of these sites in turn is outside (it never trains and receives the final models); none: all are inside.
        processes: runs at the same time, one thread each.
        say: takes a line for every run that ended.

    Returns:
        Label of a candidate -> results of all its runs.

    Raises:
        ConfigError: the task or a site's name is wrong, a row cannot have the task, or there is nobody left to train.
        StateError: the results of an earlier run in `out` are damaged.
    """
    if left_out and len(setting.sites) < 2:
        raise ConfigError(f"leaving out {', '.join(setting.sites)} leaves nobody to train; name at least two sites")
    for candidate in candidates:
        candidate.check(setting.task)
    splits: list[tuple[str, ...]] = [(site,) for site in left_out] or [()]
    jobs = [
        _Job(candidate, setting, seed, outside, run_folder(out, candidate.label, seed, outside))
        for seed in seeds
        for candidate in candidates
        for outside in splits
    ]
    write_rows(out, (candidate.label for candidate in candidates))
    missing = [job for job in jobs if not is_finished(job.folder)]
    for done, line in enumerate(_finished(missing, processes), start=1):
        say(f"[{done}/{len(missing)}] {line}")
    groups: Groups = {}
    for job in jobs:
        groups.setdefault(job.candidate.label, []).append(read_run(job.folder))
    write_atomically(out / TABLE_FILE, study_report(groups).encode(), public=True)
    return groups


def _finished(jobs: Sequence[_Job], processes: int) -> Iterable[str]:
    """One line for every job, as they end."""
    if processes <= 1:
        yield from (job() for job in jobs)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(job) for job in jobs]):
            yield future.result()
