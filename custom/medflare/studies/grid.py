"""Studies: methods side by side over seeds and splits, with single-site and centralised training as the two references.

A study is a grid of plain-loop runs. Every finished run is kept as results.json under the study's folder and not run again, so
a study can be interrupted, extended and re-tabulated.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from medflare.core.errors import ConfigError
from medflare.core.hyper import halved, parsed_value
from medflare.core.store import write_atomically, write_json
from medflare.evaluation.results import RESULTS_FILE, load_results
from medflare.federation.local.loop import run_local
from medflare.methods.catalogue import get_method
from medflare.studies.references import CENTRALISED, SINGLE_SITE, TRAINED_AS, centralised, single_site
from medflare.studies.report import TABLE_FILE, study_report
from medflare.studies.setting import Setting

_REFERENCES: Final = {SINGLE_SITE: single_site, CENTRALISED: centralised}


@dataclass(frozen=True)
class Candidate:
    """One row of a study: a method (or reference) with its hyper-parameters.

    Attributes:
        method: name of a method, "single-site" or "centralised".
        hyper: hyper-parameters under their halves, those that differ from the defaults.
        site_half, server_half: see `run_local`.
    """

    label: str
    method: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    site_half: str | None = None
    server_half: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """From "fedsm", "fedsm:lam=0.3,gamma=0.9", "prr:site.beta=1" or "moon:server_half=grace".

        Raises:
            ConfigError: no such method or hyper-parameter, a value that it cannot have, or a reference with halves of its own.
        """
        method, _, settings = text.partition(":")
        pairs = [setting.partition("=") for setting in settings.split(",") if setting]
        if bad := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(f"method {text!r}: {bad[0]!r} has no value; write METHOD:NAME=VALUE,NAME=VALUE")
        values = {name: parsed_value(value) for name, _, value in pairs}
        halves = {name: values.pop(name, None) for name in ("site_half", "server_half")}
        if method in _REFERENCES and any(halves.values()):
            raise ConfigError(f"{text}: {method} is no federation, it trains with {TRAINED_AS}'s halves alone; leave the halves out")
        trained = get_method(TRAINED_AS if method in _REFERENCES else method, site=halves["site_half"], server=halves["server_half"])
        trained.check(values)
        return cls(text, method, halved(values, trained.hyper_classes, trained.name), **halves)

    def run(self, setting: Setting, seed: int, outside: Sequence[str] = ()) -> dict[str, Any]:
        """Results dict of one run; the seed also draws the split anew by patient.

        Args:
            setting: task, sites, data and rounds.
            seed: of everything that is drawn.
            outside: sites that never train.
        """
        if self.method in _REFERENCES:
            return _REFERENCES[self.method](setting, seed, outside, self.hyper)
        return run_local(
            self.method,
            setting.task,
            [site for site in setting.sites if site not in outside],
            rounds=setting.rounds,
            seed=seed,
            outside=outside,
            data_root=setting.data_root,
            resplit=seed,
            site_half=self.site_half,
            server_half=self.server_half,
            **self.hyper,
        )


# -- the grid ------------------------------------------------------------------------------------------------------------------


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
        write_json(self.folder / RESULTS_FILE, results, public=True)
        left_out = f" without {', '.join(self.outside)}" if self.outside else ""
        return f"{self.candidate.label}{left_out}, seed {self.seed}: {results['status']}, {results['seconds']['total']:.0f} s"


def run_study(
    candidates: Sequence[Candidate],
    setting: Setting,
    seeds: Iterable[int],
    out: Path,
    *,
    leave_one_out: bool = False,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[dict[str, Any]]]:
    """Run what is not there yet and tabulate everything.

    Args:
        candidates: the rows.
        setting: task, sites, data and rounds.
        seeds: every candidate runs with each.
        out: folder for the results of every run, and for table.md (`study_report`).
        leave_one_out: each site in turn is outside (it never trains and receives the final models) instead of all inside.
        processes: runs at the same time, one thread each.
        say: takes a line for every run that ended.

    Returns:
        Label of a candidate -> results of all its runs.

    Raises:
        ConfigError: the task or a site's name is wrong, or there is nobody left to train.
        StateError: the results of an earlier run in `out` are damaged.
    """
    if leave_one_out and len(setting.sites) < 2:
        raise ConfigError(f"leaving out {', '.join(setting.sites)} leaves nobody to train; name at least two sites")
    splits: list[tuple[str, ...]] = [(site,) for site in setting.sites] if leave_one_out else [()]
    jobs = [
        _Job(candidate, setting, seed, outside, out / _folder_name(candidate.label) / "-".join([f"seed{seed}", *outside]))
        for seed in seeds
        for candidate in candidates
        for outside in splits
    ]
    missing = [job for job in jobs if not (job.folder / RESULTS_FILE).is_file()]
    for done, line in enumerate(_finished(missing, processes), start=1):
        say(f"[{done}/{len(missing)}] {line}")
    groups: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        groups.setdefault(job.candidate.label, []).append(load_results(job.folder))
    write_atomically(out / TABLE_FILE, study_report(groups, setting.task, setting.rounds).encode(), public=True)
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


def _folder_name(label: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_.=" else "_" for sign in label)
