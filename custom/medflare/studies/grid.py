"""Studies: methods side by side over seeds and splits, with single-site and centralised training as the two references.

A study is a grid of plain-loop runs. Every finished run is kept as results.json under the study's folder and not run again, so
a study can be interrupted, extended and re-tabulated.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from medflare.core.errors import ConfigError
from medflare.core.hyper import parsed_value
from medflare.core.store import write_atomically, write_json
from medflare.data.splits import SiteData, Split
from medflare.evaluation.results import RESULTS_FILE, load_results, mean_over_sites
from medflare.federation.local import run_local
from medflare.methods.catalogue import get_method
from medflare.sites.site import Site, open_site
from medflare.studies.statistics import comparison_table, markdown_table
from medflare.tasks.config import TaskConfig

SINGLE_SITE, CENTRALISED = "single-site", "centralised"
TABLE_FILE = "table.md"
POOLED = "all-sites"  # name of the one site that centralised training has


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share."""

    task: TaskConfig
    sites: tuple[str, ...]
    rounds: int
    data_root: Path | None = None


@dataclass(frozen=True)
class Candidate:
    """One row of a study: a method (or reference) with its hyper-parameters.

    Attributes:
        method: a registered method, "single-site" or "centralised".
        site_half, server_half: see `run_local`.
    """

    label: str
    method: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    site_half: str | None = None
    server_half: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """From "fedsm" or "fedsm:lam=0.3,gamma=0.9"; `site_half` and `server_half` may be among the settings.

        Raises:
            ConfigError: no such method or hyper-parameter.
        """
        method, _, settings = text.partition(":")
        pairs = [setting.partition("=") for setting in settings.split(",") if setting]
        if bad := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(f"method {text!r}: {bad[0]!r} has no value; write METHOD:NAME=VALUE,NAME=VALUE")
        hyper = {name: parsed_value(value) for name, _, value in pairs}
        halves = {name: hyper.pop(name, None) for name in ("site_half", "server_half")}
        registered = "fedavg" if method in (SINGLE_SITE, CENTRALISED) else method
        get_method(registered, site=halves["site_half"], server=halves["server_half"]).check(hyper)
        return cls(text, method, hyper, **halves)

    def run(self, setting: Setting, seed: int, outside: Sequence[str] = ()) -> dict[str, Any]:
        """Results dict of one run; the seed also draws the split anew by patient."""
        if self.method in (SINGLE_SITE, CENTRALISED):
            reference = single_site if self.method == SINGLE_SITE else centralised
            return reference(setting, seed, outside, self.hyper)
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


# -- references ----------------------------------------------------------------------------------------------------------------


def single_site(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every site trains alone, for as many epochs as in the federation, and is measured on its own test images."""
    runs = {
        site: run_local(
            "fedavg",
            setting.task,
            [site],
            rounds=setting.rounds,
            seed=seed,
            data_root=setting.data_root,
            resplit=seed,
            **{"reset_optimizer": False, **(hyper or {})},
        )
        for site in setting.sites
        if site not in outside
    }
    merged = next(iter(runs.values()))
    merged["sites"] = {site: run["sites"][site] for site, run in runs.items()}
    merged["events"] = [event for run in runs.values() for event in run["events"]]
    merged["seconds"] = {"total": sum(run["seconds"]["total"] for run in runs.values())}
    failed = [f"{site}: {run['reason']}" for site, run in runs.items() if run["reason"]]
    merged |= {
        "method": SINGLE_SITE,
        "traffic": {"down_bytes": 0, "up_bytes": 0},
        "mean": mean_over_sites(merged["sites"], merged["mean"]["inside"]),
    }
    return merged | ({"status": "FAILED", "reason": "; ".join(failed)} if failed else {})


def centralised(setting: Setting, seed: int, outside: Sequence[str] = (), hyper: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One model trained on the pooled training images of all sites, measured at each: what privacy forbids, as an upper mark."""
    task = replace(setting.task, resplit=seed)
    inside = [site for site in setting.sites if site not in outside]

    def opened(name: str, role: str) -> Site:
        def real(site: str, as_role: str) -> Site:
            return open_site(site, task, seed=seed, role=as_role, data_root=setting.data_root)

        return Site(name, task, pooled([real(site, "inside").data for site in inside]), seed) if name == POOLED else real(name, role)

    results = run_local(
        "fedavg",
        task,
        [POOLED],
        rounds=setting.rounds,
        seed=seed,
        outside=setting.sites,
        opener=opened,
        **{"reset_optimizer": False, **(hyper or {})},
    )
    del results["sites"][POOLED]
    for name, site in results["sites"].items():
        site["role"] = "outside" if name in outside else "inside"
    return results | {
        "method": CENTRALISED,
        "traffic": {"down_bytes": 0, "up_bytes": 0},
        "mean": mean_over_sites(results["sites"], results["mean"]["inside"]),
    }


def pooled(parts: Sequence[SiteData]) -> SiteData:
    """All sites' images as one site's; a patient's name carries the place of its site, so that equal names stay two patients."""

    def joined(splits: list[Split]) -> Split:
        return Split(
            torch.cat([split.images for split in splits]),
            torch.cat([split.targets for split in splits]),
            tuple(f"{place}/{patient}" for place, split in enumerate(splits) for patient in split.patients),
            tuple(f"{place}/{name}" for place, split in enumerate(splits) for name in split.names),
        )

    train, validation, test = (joined([part.split(name) for part in parts]) for name in ("train", "validation", "test"))
    return SiteData(train, validation, test)


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
        write_json(self.folder / RESULTS_FILE, results)
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
    """Run what is not there yet and return label -> results of all runs; also writes table.md (`report`).

    Args:
        leave_one_out: each site in turn is outside (it never trains and receives the final models) instead of all inside.
        processes: runs at the same time, one thread each.
    """
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
    write_atomically(out / TABLE_FILE, report(groups, setting).encode())
    return groups


def report(groups: Mapping[str, Sequence[Mapping[str, Any]]], setting: Setting) -> str:
    """Markdown: a table for each of the task's metrics, its main one first, and the paired differences in the main one."""
    task = setting.task
    metrics = sorted(task.metrics, key=lambda metric: metric != task.metric)
    tables = {metric: markdown_table(groups, metric) for metric in metrics}
    tables[f"{task.metric}, differences seed by seed"] = comparison_table(groups, task.metric)
    sections = (f"## {title}\n\n{table}" for title, table in tables.items())
    return "\n".join([f"# {task.name}, {setting.rounds} rounds\n", *sections])


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
