"""From a method, a task and settings to a FLARE job, and to the job that takes up an interrupted one.

A job is configuration only; the code is installed at the sites, or a copy of it lies in the job.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.job_config.api import FedJob
from pydantic import Field
from pydantic.dataclasses import dataclass

import medflare
from medflare.core.errors import ConfigError
from medflare.core.hyper import SplitHyper
from medflare.core.manifest import Manifest
from medflare.core.settings import STRICT, checked
from medflare.core.store import write_json
from medflare.federation.preflight import check_run
from medflare.federation.settings import RUN_SETTINGS, RunSettings
from medflare.flare.aggregators import AGGREGATORS, MethodAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.executors import EXECUTORS, MedflareExecutor
from medflare.flare.jobs.sessions import ABOUT, beside, put_in_place
from medflare.flare.names import TASK_FILE
from medflare.flare.tracking import MLflowTracker
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig, load_task

# A poll for work costs next to nothing; FLARE's default of two seconds between polls would be most of a short round.
_POLL = 0.1
# Up to this size of an update its tensors travel inside the message: one transfer instead of several, and a site that dies
# while it answers cannot take the server's job process with it, as it does where FLARE fetches the tensors afterwards.
_INLINE = 64 * 2**20
_CHUNK = 16 * 2**20

_BYOC_README = """\
# Your own classes

Python files in this folder can be imported in the job: an executor, an aggregator or a filter of your own that
`config_fed_server.json` or `config_fed_client.json` names.

To FLARE a job with this folder is "bring your own code". Sites that refuse such jobs run one without it
(`medflare job ... --no-byoc`): they install medflare, and `medflare site setup` lists its classes in their `resources.json`.
"""

_README = """\
# medflare {version}

This job carries its own code: the package as it was where the job was written. Sites and server need Python with torch, MONAI
and FLARE. Where medflare is installed as well, FLARE takes the installed one.

Beyond the embedded synthetic images a site needs what decodes its files: pillow for PNG, JPEG and TIFF, nibabel for NIfTI,
pydicom for DICOM. Without scipy HD95 is undefined, without matplotlib the report has no figures. TensorBoard files are not written;
metrics.jsonl has the numbers.
"""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class JobSettings(RunSettings):
    """What a job fixes beside its task: the run's settings, and

    Attributes:
        method: name of the method; `site_algorithm` and `server_algorithm` swap in the half of another one.
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`.
        byoc: whether the job has an app/custom/ folder for classes of the user's own.
        embed_code: whether that folder holds medflare itself, for sites and a server where it is not installed.
        track: "mlflow" or "mlflow=URI": the server's curves go to MLflow too, see `MLflowTracker`; "" for TensorBoard alone.
    """

    method: str
    rounds: Annotated[int, Field(ge=0)] = 10
    seed: int = 0
    hyper: dict[str, Any] = field(default_factory=dict)
    site_algorithm: str | None = None
    server_algorithm: str | None = None
    byoc: bool = True
    embed_code: bool = False
    track: str = ""

    def __post_init__(self) -> None:
        if self.track and not re.fullmatch(r"mlflow(=\S+)?", self.track):
            raise ConfigError(f"track must be mlflow, or mlflow=URI with the address of an MLflow server, got {self.track!r}")
        if self.embed_code and not self.byoc:
            raise ConfigError("a job that carries its code (--embed-code) has an app/custom/ folder (no --no-byoc); choose one of the two")


JOB_SETTINGS = tuple(found.name for found in fields(JobSettings))


class FederationJob(FedJob):
    """A federation as FLARE's own job object: exported, simulated, submitted, or extended with components.

    Raises:
        ConfigError: a method, a hyper-parameter or a setting is wrong.
    """

    def __init__(self, task: TaskConfig, settings: JobSettings):
        method = get_method(settings.method, site=settings.site_algorithm, server=settings.server_algorithm)
        check_run(method, task, settings.hyper, rounds=settings.rounds, outside=settings.outside)
        hyper = method.effective(settings.hyper)  # all of them, so that a reader of the job sees what there is to set
        about = {JobMetaKey.CUSTOM_PROPS.value: {ABOUT: {"method": method.name, "rounds": settings.rounds}}}
        name = f"{method.name.replace('+', '_')}-{task.name}"
        super().__init__(name=name, min_clients=settings.min_sites or 1, meta_props=about)
        self.set_app_packages(["medflare"])  # else FLARE copies the sources of our classes into the job
        self._files = tempfile.TemporaryDirectory(prefix="medflare-")  # read when the job is exported; lives as long as the job
        self.to_server(_controller(settings), id="medflare")
        self.to_server(_aggregator(method, hyper), id="aggregator")
        if not settings.embed_code:  # tensorboard may be missing too; metrics.jsonl holds the same numbers
            self.to_server(TBAnalyticsReceiver(), id="tensorboard")
        if settings.track:
            self.to_server(MLflowTracker(settings.track.partition("=")[2], f"medflare {task.name}", method.name), id="mlflow")
        self.to_clients(_executor(settings, method, hyper), tasks=["*"])
        transport = _transport(method, task, hyper)
        self.to_server({"server": {"task_request_interval": _POLL}, **transport})
        self.to_clients({"get_task_timeout": 30.0, "submit_task_result_timeout": 60.0, **transport})
        write_json(Path(self._files.name) / TASK_FILE, task.to_dict(), public=True)
        self.add_file_to_server(str(Path(self._files.name) / TASK_FILE), app_folder_type="config")
        if settings.embed_code:
            self.to_server(str(copy_package(Path(self._files.name) / "custom")))
        elif settings.byoc:
            readme = Path(self._files.name) / "README.md"
            readme.write_text(_BYOC_README)
            self.add_file_to_server(str(readme))


def build_job(method: str, task: TaskConfig | str | Path | Mapping[str, Any], *, out: Path | str, **settings: Any) -> Path:
    """Write a job folder: meta.json, app/config/{config_fed_server,config_fed_client,task}.json and, if wanted, app/custom/.

    Args:
        method: name of the method.
        task: preset name, JSON file, mapping or configuration.
        out: the folder to write; an older job in it is replaced, unless files of the user's own lie there.
        settings: fields of `JobSettings`.

    Raises:
        ConfigError: a setting is wrong, or `out` holds something that is no job, or more than a job.
    """
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()) and not (folder / "meta.json").exists():
        raise ConfigError(f"{folder} holds files and is no job folder; choose another one")
    ours = ("README.md", Path(medflare.__file__).parent.name, "__pycache__")
    in_custom = [path for path in sorted((folder / "app" / "custom").glob("*")) if path.name not in ours]
    if own := [*in_custom, *(path for path in sorted(folder.glob("*")) if path.name not in ("meta.json", "app"))]:
        raise ConfigError(f"{own[0]} would be lost, as the job there is written anew; choose another folder, or move it away")
    job = FederationJob(load_task(task), checked(JobSettings, {"method": method, **settings}, "job"))
    place = folder.resolve()
    with beside(place) as scratch:
        job.export_job(str(scratch))
        put_in_place(scratch / job.name, place)
    return folder


def resumed_job(job: Path, interrupted: str, out: Path) -> Path:
    """Write the job that takes up an interrupted one: the same folder, with the id of the interrupted one in its configurations.

    Args:
        job: the job folder that was submitted.
        interrupted: FLARE's id of the job.
        out: the folder to write.

    Raises:
        ConfigError: `job` is no job folder of medflare's, or `out` exists.
    """
    configs = {side: job / "app" / "config" / f"config_fed_{side}.json" for side in ("server", "client")}
    if not all(path.is_file() for path in configs.values()):
        raise ConfigError(f"{job} is no job folder: app/config/config_fed_server.json or config_fed_client.json is missing")
    if out.exists():
        raise ConfigError(f"{out} exists; choose another folder")
    paths = (*configs.values(), job / "meta.json")
    try:
        server, client, meta = contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        server["workflows"][0]["args"]["resume"] = interrupted
        client["executors"][0]["executor"]["args"]["resume"] = interrupted
        meta.setdefault(JobMetaKey.CUSTOM_PROPS.value, {}).setdefault(ABOUT, {})["resume"] = interrupted
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{job} is no job folder of medflare's ({reason}); name the folder that was submitted") from error
    with beside(out) as scratch:
        new = scratch / "job"
        shutil.copytree(job, new)
        for path, content in zip(paths, contents, strict=True):
            write_json(new / path.relative_to(job), content, public=True)
        put_in_place(new, out)
    return out


# -- folders -------------------------------------------------------------------------------------------------------------------


def copy_package(folder: Path) -> Path:
    """Copy the running package into `folder`/medflare, without compiled files, beside a README; returns `folder`."""
    package = Path(medflare.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (folder / "README.md").write_text(_README.format(version=medflare.__version__), encoding="utf-8")
    return folder


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# -- components ----------------------------------------------------------------------------------------------------------------


def _controller(settings: JobSettings) -> MedflareController:
    """The controller with what differs from its defaults; FLARE writes no more than that."""
    chosen = {name: getattr(settings, name) for name in RUN_SETTINGS}
    return MedflareController(site_algorithm=settings.site_algorithm, **chosen)


def _aggregator(method: Method, hyper: SplitHyper) -> MethodAggregator:
    """The aggregator named after the server algorithm's formula: the method's own, or that of the algorithm which it is derived from."""
    name = method.algorithms[1]
    named = {get_method(known).server_class.aggregation_class: known for known in AGGREGATORS}
    chosen = name if name in AGGREGATORS else named.get(method.server_class.aggregation_class)
    if chosen is None:
        return MethodAggregator(hyper, name)
    return AGGREGATORS[chosen](hyper, "" if chosen == name else name)


def _executor(settings: JobSettings, method: Method, hyper: SplitHyper) -> MedflareExecutor:
    name, server = method.algorithms
    options: dict[str, Any] = {"seed": settings.seed, "hyper": hyper, "resume": settings.resume}
    options["server_algorithm"] = "" if server == name else server
    return EXECUTORS[name](**options) if name in EXECUTORS else MedflareExecutor(method=name, **options)


def _transport(method: Method, task: TaskConfig, hyper: SplitHyper) -> dict[str, int]:
    """FLARE's setting for the way tensors travel: inside the message (0), or fetched afterwards in chunks of so many bytes."""
    update = method.site_class.manifest("train", method.plan(task, ("one", "two"), hyper)) if method.trains else {}
    return {"np_download_chunk_size": 0 if manifest_bytes(update) <= _INLINE else _CHUNK}


def manifest_bytes(manifest: Manifest) -> int:
    """Size of all tensors that a manifest allows."""
    return sum(math.prod(shape) * dtype.itemsize for entry in manifest.values() for shape, dtype in entry.tensors.values())
