"""Runs of a study as jobs of a Slurm cluster, one array, by the package submitit."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from medflare.core.errors import ConfigError, one_line
from medflare.core.files import make_folder
from medflare.core.hyper import parsed_value
from medflare.core.packages import require

FOLDER = "cluster"  # in a study's folder: the logs of its jobs
_CLUSTERS = ("slurm", "local")  # local: processes of this machine, to try it

Job = TypeVar("Job", bound=Callable[[], Any])


def executor_of(cluster: str, folder: Path, processes: int) -> Any:
    """submitit's executor for "slurm:gpus_per_node=1,slurm_partition=gpu"; ConfigError for an
    unknown cluster or setting.

    `processes`: jobs at the same time; 1: as many as the cluster starts.
    """
    require("submitit", "--cluster")
    import submitit

    name, _, text = cluster.partition(":")
    if name not in _CLUSTERS:
        raise ConfigError(f"--cluster {name!r} is unknown; choose {' or '.join(_CLUSTERS)}")
    settings = {"name": "medflare", "timeout_min": 24 * 60}
    if processes > 1:
        settings["slurm_array_parallelism"] = processes
    for setting in filter(None, text.split(",")):
        key, _, value = setting.partition("=")
        settings[key] = parsed_value(value)
    make_folder(folder)
    try:
        executor = submitit.AutoExecutor(folder, cluster=name)
        executor.update_parameters(**settings)
    except (NameError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"--cluster {cluster}: {one_line(error)}") from error
    return executor


def finished_jobs(executor: Any, jobs: Sequence[Job]) -> Iterator[tuple[Job, Callable[[], Any]]]:
    """Every job with the function that returns its result or raises its error, as they end."""
    from submitit.helpers import as_completed

    with executor.batch():
        handles = [executor.submit(job) for job in jobs]
    job_of = dict(zip(map(id, handles), jobs, strict=True))
    try:
        for handle in as_completed(handles, poll_frequency=1):
            yield job_of[id(handle)], handle.result
            handle.paths.result_pickle.unlink(missing_ok=True)  # it holds scores of patients
    finally:
        for handle in handles:
            if not handle.done():  # after Ctrl-C
                handle.cancel()
