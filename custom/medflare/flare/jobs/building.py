"""Builds FLARE jobs, and the job that resumes an interrupted one.

A job is configuration only; the code is installed at the sites, or a copy of it is in the job.
"""

import re
import shutil
import tempfile
from dataclasses import KW_ONLY, field, fields
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.job_config.api import FedJob
from pydantic import NonNegativeInt

import medflare
from medflare.core.errors import ConfigError
from medflare.core.files import refuse_links, write_json
from medflare.core.hyper import SplitHyper
from medflare.core.settings import checked, strict_dataclass
from medflare.core.text import Json, JsonDict, read_json
from medflare.federation.preflight import check_run
from medflare.federation.settings import RUN_SETTINGS, RunSettings
from medflare.federation.tracking import check_track
from medflare.flare.aggregators import AGGREGATORS, MethodAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.executors import EXECUTORS, MedflareExecutor
from medflare.flare.job_policy import SIGNATURES
from medflare.flare.jobs.sessions import ABOUT, beside, put_in_place
from medflare.flare.names import TASK_FILE
from medflare.flare.tracking import MLFLOW, MLflowTracker
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig, load_task

# Seconds between two polls of a site; FLARE's default of two seconds would be most of a short
# round.
_POLL = 0.1
# Up to this size the tensors of an update are inside the message. If FLARE fetches them afterwards,
# a site that dies meanwhile ends the server's job process.
_INLINE = 64 * 2**20
_CHUNK = 16 * 2**20

_BYOC_README = """\
# Your own classes

Python files in this folder can be imported in the job: \
an executor, an aggregator or a filter of your own that
`config_fed_server.json` or `config_fed_client.json` names.

To FLARE a job with this folder is "bring your own code". \
Sites that refuse such jobs run one without it
(`medflare job ... --no-byoc`): \
they install medflare, and `medflare site setup` lists its classes in their `resources.json`.
"""

_README = """\
# medflare {version}

This job carries its own code: the package as it was where the job was written. \
Sites and server need Python with torch, MONAI
and FLARE. Where medflare is installed as well, FLARE takes the installed one.

Beyond the embedded synthetic images a site needs what decodes its files: \
pillow for PNG, JPEG and TIFF, nibabel for NIfTI,
pydicom for DICOM. Without scipy HD95 is undefined, \
without matplotlib the report has no figures, without tensorboard there are no
TensorBoard files; metrics.jsonl has the numbers.
"""


@strict_dataclass
class JobSettings(RunSettings):
    """The settings of a job: those of the run, and

    Attributes:
        method: name of the method; `site_algorithm` and `server_algorithm` name another method for
            one of the two.
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`.
        byoc: whether the job has an app/custom/ folder for the user's own classes.
        embed_code: whether that folder holds medflare itself, for a server and sites where it is
            not installed.
        track: where the server's curves go, see `federation.tracking.check_track`.
    """

    _: KW_ONLY
    method: str
    rounds: NonNegativeInt = 10
    seed: int = 0
    hyper: JsonDict = field(default_factory=dict)
    site_algorithm: str | None = None
    server_algorithm: str | None = None
    byoc: bool = True
    embed_code: bool = False
    track: str | None = None

    def __post_init__(self) -> None:
        check_track(self.track, here=False)
        if self.embed_code and not self.byoc:
            raise ConfigError(
                "a job that carries its code (--embed-code) has an app/custom/ folder "
                "(no --no-byoc); choose one of the two"
            )


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")  # of FLARE's jobs
JOB_SETTINGS = tuple(item.name for item in fields(JobSettings))


class FederationJob(FedJob):
    """A federation as FLARE's own job object, which can be exported, simulated, submitted or
    extended with components.

    Raises:
        ConfigError: a method, a hyper-parameter or a setting is invalid.
    """

    def __init__(self, task: TaskConfig, settings: JobSettings):
        method = get_method(
            settings.method, site=settings.site_algorithm, server=settings.server_algorithm
        )
        check_run(method, task, settings.hyper, settings)
        hyper = method.effective(settings.hyper)  # with all defaults, as documentation
        about = {"method": method.name, "rounds": settings.rounds}
        super().__init__(
            name=_NOT_IN_NAMES.sub("_", f"{method.name}-{task.name}"),
            min_clients=settings.min_sites or 1,
            meta_props={JobMetaKey.CUSTOM_PROPS.value: {ABOUT: about}},
        )
        self.set_app_packages(["medflare"])  # otherwise FLARE copies their sources into the job
        # Read when the job is exported.
        self._files = tempfile.TemporaryDirectory(prefix="medflare-")
        values = {name: getattr(settings, name) for name in ("site_algorithm", *RUN_SETTINGS)}
        track = settings.track
        tracker = None
        if track is not None and track.startswith(MLFLOW):
            tracker = MLflowTracker(track)
            track = None
        self.to_server(MedflareController(track=track, **values), id="medflare")
        self.to_server(_aggregator(method, hyper), id="aggregator")
        if tracker is not None:
            self.to_server(tracker, id=MLFLOW)
        self.to_clients(_executor(settings, method, hyper), tasks=["*"])
        transport = _transport(method, task, hyper)
        self.to_server({"server": {"task_request_interval": _POLL}, **transport})
        self.to_clients({"get_task_timeout": 30.0, "submit_task_result_timeout": 60.0, **transport})
        files = Path(self._files.name)
        write_json(files / TASK_FILE, task.to_dict(), public=True)
        self.add_file_to_server(str(files / TASK_FILE), app_folder_type="config")
        if settings.embed_code:
            self.to_server(str(copy_package(files / "custom")))
        elif settings.byoc:
            readme = files / "README.md"
            readme.write_text(_BYOC_README)
            self.add_file_to_server(str(readme))


def build_job(
    method: str, task: TaskConfig | str | Path | Json, *, out: Path | str, **settings: Any
) -> Path:
    """Write a job folder: meta.json, app/config/{config_fed_server,config_fed_client,task}.json
    and, if wanted, app/custom/.

    Args:
        task: preset name, JSON file, mapping or configuration.
        out: the folder; an older job in it is replaced, unless there are files of the user.
        settings: fields of `JobSettings`.

    Raises:
        ConfigError: a setting is invalid, or `out` holds other files than a job's.
    """
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()) and not (folder / "meta.json").exists():
        raise ConfigError(f"{folder} holds files and is no job folder; choose another one")
    of_job = ("meta.json", "app", *SIGNATURES)  # FLARE signs a folder that is submitted
    others = [path for path in folder.glob("*") if path.name not in of_job]
    ours = ("README.md", "medflare", "__pycache__", *SIGNATURES)
    others += [path for path in (folder / "app/custom").glob("*") if path.name not in ours]
    if others:
        raise ConfigError(
            f"{min(others)} would be lost, as the job there is written anew; "
            "choose another folder, or move it away"
        )
    job = FederationJob(
        load_task(task), checked(JobSettings, {"method": method, **settings}, "job")
    )
    with beside(folder.resolve()) as scratch:
        job.export_job(str(scratch))
        put_in_place(scratch / job.name, folder.resolve())
    return folder


def resumed_job(job: Path, interrupted: str, out: Path) -> Path:
    """Write the job that resumes an interrupted one: a copy with the id of the interrupted job in
    its configuration.

    Args:
        job: the job folder that was submitted.
        interrupted: FLARE's id of the job.
        out: the folder to write.

    Raises:
        ConfigError: `job` is no job folder of medflare, or `out` exists.
        StateError: a link is in `job`.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; choose another folder")
    refuse_links(job)
    config = job / "app" / "config"
    paths = (
        config / "config_fed_server.json",
        config / "config_fed_client.json",
        job / "meta.json",
    )
    try:
        contents = [read_json(path) for path in paths]
        server, client, meta = contents
        server["workflows"][0]["args"]["resume"] = interrupted
        client["executors"][0]["executor"]["args"]["resume"] = interrupted
        properties = meta.setdefault(JobMetaKey.CUSTOM_PROPS.value, {})
        properties.setdefault(ABOUT, {})["resume"] = interrupted
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{job} is no job folder of medflare ({type(error).__name__}: {error}); "
            "name the submitted folder"
        ) from error
    with beside(out) as scratch:
        new = scratch / "job"
        shutil.copytree(job, new)
        for path, content in zip(paths, contents, strict=True):
            write_json(new / path.relative_to(job), content, public=True)
        put_in_place(new, out)
    return out


def copy_package(folder: Path) -> Path:
    """Copy the running package, without compiled files, to `folder`/medflare and add a README;
    returns `folder`.
    """
    package = Path(medflare.__file__).parent
    shutil.copytree(
        package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    readme = _README.format(version=medflare.__version__)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return folder


def _aggregator(method: Method, hyper: SplitHyper) -> MethodAggregator:
    """The aggregator of the server algorithm, else that of a method with the same aggregation, else
    the general one.
    """
    name = method.algorithms[1]
    if name in AGGREGATORS:
        return AGGREGATORS[name](hyper)
    aggregation = method.server_class.aggregation_class
    for other, aggregator in AGGREGATORS.items():
        if get_method(other).server_class.aggregation_class is aggregation:
            return aggregator(hyper, name)
    return MethodAggregator(hyper, name)


def _executor(settings: JobSettings, method: Method, hyper: SplitHyper) -> MedflareExecutor:
    name, server = method.algorithms
    options: JsonDict = {
        "seed": settings.seed,
        "hyper": hyper,
        "resume": settings.resume,
        "server_algorithm": "" if server == name else server,
    }
    if name in EXECUTORS:
        return EXECUTORS[name](**options)
    return MedflareExecutor(method=name, **options)


def _transport(method: Method, task: TaskConfig, hyper: SplitHyper) -> dict[str, int]:
    """FLARE's setting for tensors: they are inside the message (0), or fetched afterwards in chunks
    of so many bytes.
    """
    size = 0  # bytes of an update
    if method.trains:
        plan = method.plan(task, ("one", "two"), hyper)
        size = sum(entry.nbytes for entry in method.site_class.manifest("train", plan).values())
    return {"np_download_chunk_size": 0 if size <= _INLINE else _CHUNK}
