"""A site's participant under FLARE: what a process needs to know to act for the site.

The imports at the top are light: in the simulator the sites' processes do not import torch.
"""

import gc
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, MedflareError
from medflare.core.text import Json
from medflare.data.local import CACHE, FOLDER, PLACE, local_settings, read_local
from medflare.federation.settings import STATE
from medflare.flare.job_policy import foreign_method_module

if TYPE_CHECKING:
    from medflare.federation.participant import Participant
    from medflare.training.site import Site

# In FLARE's context while a task and the filters of its result run.
RESULT_CONTEXT = "medflare.result_context"
_DATA_ROOT = "MEDFLARE_DATA_ROOT"
DEVICES = "CUDA_VISIBLE_DEVICES"  # the simulator sets it for each site's process
# Folder beside local/medflare.json: the privacy budget that the site's jobs have spent, and the
# record of each data folder.
_LEDGER = "privacy"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParticipantSpec:
    """What makes a site's participant; another process makes it anew from its JSON.

    Attributes:
        method: name of the method whose site algorithm runs.
        server_algorithm: name of the method whose server algorithm runs, if it is another one.
        task_file: the job's task.json.
        local_file: the site's local/medflare.json; may be missing.
        folder: the site's own folder of the job, see `data.local.private_folder`.
        resumed: the site's folder in the interrupted job that this job resumes.
        trusted: modules of other distributions that the task names and the site allows, see
            `job_policy.authorize`.
    """

    name: str
    method: str
    server_algorithm: str
    seed: int
    task_file: Path
    local_file: Path
    folder: Path
    hyper: Json = field(default_factory=dict)
    resumed: Path | None = None
    trusted: Sequence[str] = ()

    @property
    def state_folder(self) -> Path:
        """Where the participant's state is stored between tasks."""
        return self.folder / STATE

    @property
    def _in_container(self) -> bool:
        return self.folder.name == FOLDER  # see `private_folder`

    def participant(
        self, aborted: Callable[[], bool], *, share_model: bool = False
    ) -> "Participant":
        """The site's participant; it reads its data when the first task needs them.

        Args:
            share_model: whether the personal model may leave, as by the site's own setting.

        Raises:
            ConfigError: the task, the method or the site's local settings are wrong.
        """
        from medflare.core.extensions import trust
        from medflare.core.store import StateStore
        from medflare.data.loading import resolve_data_root
        from medflare.federation.data_record import DataRecord, record_folder
        from medflare.federation.final_models import SiteFolder
        from medflare.federation.participant import Participant
        from medflare.methods.catalogue import get_method
        from medflare.privacy.ledger import budget_of
        from medflare.tasks.config import load_task
        from medflare.training.opening import check_task_bounds, open_site

        # 1. The site's settings, and the job's task and method.
        if self.resumed:
            self._resume(self.resumed / STATE)
        local = local_settings(read_local(self.local_file))
        for module in (*local.packages, *self.trusted):
            trust(module)
        task = load_task(self.task_file)
        method = get_method(self.method, server=self.server_algorithm or None)
        check_task_bounds(task, local.bounds, f"site {self.name}")  # `check` builds the network
        method.check(self.hyper, task)

        # 2. What is counted over all jobs.
        keeps_record = local.minimum_patients > 1 or local.privacy is not None
        records = self.local_file.with_name(_LEDGER)
        if local.records:
            records = Path(local.records).expanduser()
        elif keeps_record and self._in_container:
            raise ConfigError(
                f"site {self.name} runs jobs in containers, which keep nothing of what is counted "
                f"over all jobs; mount a folder for it that jobs may write, and name it as records "
                f"in its {PLACE}"
            )

        def record() -> DataRecord | None:
            """The data folder's record; None for generated images, or a site without secrets."""
            root = resolve_data_root(self.name, task, local.data_root)
            if root is None or not keeps_record:
                return None
            return DataRecord(
                folder=record_folder(records, root),
                data=root,
                job=self.folder.parent.name if self._in_container else self.folder.name,
                most_evaluations=local.bounds.evaluations,
                most_validations=local.bounds.validations,
                private=local.privacy is not None,
            )

        # 3. The participant.
        def opened(role: str) -> "Site":
            """The site with its data, whose reading is recorded."""
            data_record = record()
            if data_record is not None:
                data_record.note_reading(self.name, task)
            site = open_site(
                self.name,
                task,
                seed=self.seed,
                role=role,
                local=local,
                cache=self.local_file.parents[1] / CACHE,
                abort=aborted,
            )
            for note in (*site.notes, site.data.dropped_line):
                if note:
                    _log.info("%s: %s", self.name, note)
            return site

        folder = SiteFolder(self.folder, self.name, method, task, self.seed)
        return Participant(
            self.name,
            opened,
            method,
            self.hyper,
            store=StateStore(self.state_folder),
            folder=folder,
            budget=budget_of(local.privacy, self.name, records),
            local=replace(local, share_model=share_model or local.share_model),
            hours=local.bounds.hours,
            record=record,
            note_step=folder.note_step,
        )

    def _resume(self, interrupted: Path) -> None:
        """Copy the state of the interrupted job, once and atomically; that job's own folder stays
        as it is.
        """
        if interrupted.exists() and not self.state_folder.exists():
            partial = self.state_folder.with_name(f".{STATE}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(interrupted, partial)
            partial.rename(self.state_folder)


class ResultContext(NamedTuple):
    """The task that a site is working on, for the filters of its result."""

    phase: str
    round: int
    spec: ParticipantSpec


def load_ahead(method: str, task_file: str = "") -> None:
    """Import what a site needs of a method, and of a task if its file is given. Errors are left to
    the first task.

    A method of another distribution is not imported: the party has not been asked yet, see
    `job_policy.authorize`.

    `gc.freeze` takes what was imported out of garbage collection: a fork that collects torch and
    MONAI would copy more than 100 MB of memory that it shares otherwise.
    """
    from medflare.data.transforms import Augmentation, Preprocessing
    from medflare.federation.participant import import_ahead
    from medflare.methods.catalogue import get_method
    from medflare.networks.catalogue import meta_network
    from medflare.tasks.config import load_task
    from medflare.tasks.losses import build_loss

    import_ahead()
    with suppress(MedflareError):
        _ = get_method("fedavg" if foreign_method_module(method) else method).site_class
    with suppress(MedflareError):
        if task_file:  # what is made here imports MONAI where it is used
            task = load_task(Path(task_file))
            meta_network(task)
            build_loss(task)
            Preprocessing(task)
            Augmentation(task)
    gc.freeze()


def checked_job_id(job: str) -> str:
    """The id of a job to resume, safe as a folder's name.

    Raises:
        ConfigError: it is not a job id, but for example a path.
    """
    if not re.fullmatch(r"[\w-]+", job):
        raise ConfigError(
            f"resume = {job!r} is no job id; "
            "give the id that FLARE listed the interrupted job under"
        )
    return job


def anchor_data_root() -> None:
    """Make a relative MEDFLARE_DATA_ROOT absolute by the shell's PWD, as FLARE changes the working
    directory.
    """
    path = os.environ.get(_DATA_ROOT)
    started_in = os.environ.get("PWD")
    if path and started_in and not Path(path).expanduser().is_absolute():
        os.environ[_DATA_ROOT] = str(Path(started_in) / path)
