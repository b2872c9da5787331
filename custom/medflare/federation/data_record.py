"""What a site has reported of one data folder over all jobs.

The first job fixes which images are used, with which labels, in which split: from the counts and
metrics of two jobs that differ in them, those of single patients could be computed. Each evaluation
on test images is noted, and the number of those on validation images.
"""

import csv
import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medflare.core.errors import ConfigError
from medflare.core.files import csv_text, file_digest, locked, write_atomically, write_json
from medflare.core.text import Json, JsonDict, read_json
from medflare.data.class_counts import counts_by_image
from medflare.data.datalist import FILE, SPLITS
from medflare.data.decoding import reading_settings
from medflare.data.local import PLACE, Bounds
from medflare.data.targets import stored_values
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

SELECTION = "selection.json"  # the file that a site deletes to allow another selection
EVALUATIONS = "evaluations.csv"
VALIDATIONS = "validations.json"
READINGS = "readings.json"
_MOST_REFUSED = 5  # selections, of first jobs
_MOST_READINGS = 20  # of the training images
_OF_SIZE = ("size", "image_mode", "spacing", "orientation", "slices", "spatial_dims")
_LOCK = ".lock"
_LABELS = "labels"  # beside the splits
_SLICE = re.compile(r"\[\d+\]\Z")  # the end of the name of a volume's slice
_COLUMNS = ("time", "job", "phase", "models")
_Used = dict[str, Any]  # see `_digests_of_patients`


@dataclass(frozen=True)
class DataRecord:
    """The record of one data folder.

    Attributes:
        folder: of the record's files, below local/ of the site's kit.
        data: the data folder.
        job: id of the present job.
        most_evaluations: `Bounds.evaluations`.
        private: whether the site has a privacy budget; then evaluations must not reach patients
            that DP-SGD has trained on, also when the datalist changes.
        most_validations: `Bounds.validations`.
    """

    folder: Path
    data: Path
    job: str
    most_evaluations: int
    private: bool = False
    most_validations: int = Bounds.validations

    def fix_used_images(self, site: Site) -> None:
        """Note the selection and split of the first job; if enough patients of the datalist change,
        the next job fixes them anew.

        Raises:
            ConfigError: this job selects or splits the images in another way, or a split differs
                from an earlier job's in a few patients, whose labels two counts would tell.
        """
        present = {
            "datalist": file_digest(self.data / FILE),
            "selection": used_images_digest(site),
            "unreadable": _unreadable(site),
        }
        used = _digests_of_patients(site)
        with locked(self.folder / _LOCK):  # two jobs at the same time are not both the first
            first = self._stored(SELECTION, {})
            same_data = first.get("datalist") == present["datalist"]
            other_images = same_data and first["selection"] != present["selection"]
            # Limits that a site's unreadable images just meet would tell their number.
            limit = first.get("unreadable", present["unreadable"])
            other_limit = same_data and limit != present["unreadable"]
            if other_images or other_limit:
                raise other_images_refusal(site.name)
            noted = dict(first)
            if not same_data:
                for earlier in first.get("used", []):
                    _check_changed_patients(site, earlier, used)
                noted = {"job": self.job, "time": _now(), "refused": first.get("refused", 0)}
                noted |= present
                noted["used"] = [*first.get("used", []), used]
            if self.private:
                is_of_older_version = first and not same_data and "trained" not in first
                trained = set(first.get("trained", []))
                evaluated = {*site.data.validation.patients, *site.data.test.patients}
                if is_of_older_version or trained & evaluated:
                    raise _trained_patients(site.name)
                noted["trained"] = sorted(trained.union(site.data.train.patients))
            if noted != first:
                write_json(self.folder / SELECTION, noted)

    def note_refusal(self) -> None:
        """Forget the selection of a first job that the site has refused, so that a lead can correct
        it.

        With a privacy budget, or after a few refusals, the selection stays, since each refusal
        tells something of the counts.
        """
        if self.private:
            return
        with locked(self.folder / _LOCK):
            first = self._stored(SELECTION, {})
            refused = first.get("refused", 0) + 1
            if first.get("job") == self.job and refused <= _MOST_REFUSED:
                earlier = first.get("used", [])[:-1]
                write_json(self.folder / SELECTION, {"refused": refused, "used": earlier})

    def note_reading(self, site: str, task: TaskConfig) -> None:
        """Note how a task will read the images: whether a transform fails on one or makes it plain
        (see `site_rules.check_contrast`) tells something of its pixels.

        Raises:
            ConfigError: earlier jobs have read this data in the maximum number of other ways.
        """
        reading = _reading(task)
        with locked(self.folder / _LOCK):
            readings = self._stored(READINGS, [])
            if reading in [earlier["settings"] for earlier in readings]:
                return
            if len(readings) >= _MOST_READINGS:
                raise ConfigError(
                    f"site {site}: earlier jobs have read this data in {_MOST_READINGS} ways "
                    "(intensity, size, spacing, ...), and each answers a question about single "
                    f"images; use one of these, or have the site delete its {READINGS}"
                )
            noted = {"job": self.job, "settings": reading, "enrolled": False}
            write_json(self.folder / READINGS, [*readings, noted])

    def note_enrolment(self, task: TaskConfig) -> bool:
        """Note that a job has enrolled; return whether its masks have the size of the first such
        job's, since pixels of a class at two sizes tell of few patients.
        """
        settings = _reading(task)
        with locked(self.folder / _LOCK):
            readings = self._stored(READINGS, [])
            for reading in readings:
                reading["enrolled"] |= reading["settings"] == settings
            write_json(self.folder / READINGS, readings)
        first = next((reading["settings"] for reading in readings if reading["enrolled"]), settings)
        return all(first[name] == settings[name] for name in _OF_SIZE)

    def _stored(self, file: str, nothing: Any) -> Any:
        """The content of one of the record's files; `nothing` if there is none."""
        path = self.folder / file
        return read_json(path) if path.exists() else nothing

    def is_fixed(self) -> bool:
        """Whether an earlier job has fixed the selection from the present datalist."""
        first = self._stored(SELECTION, {})
        datalist = self.data / FILE
        return datalist.exists() and bool(first.get("datalist") == file_digest(datalist))

    def note_evaluation(
        self, phase: str, models: int, site: str, *, repeated: bool = False
    ) -> None:
        """Note that so many models are evaluated on test images in a phase of the job.

        Args:
            repeated: the request is the last one again; it is noted if it was not before.

        Raises:
            ConfigError: with these the data folder has more evaluations than the site allows.
        """
        path = self.folder / EVALUATIONS
        with locked(self.folder / _LOCK):
            earlier = []
            if path.exists():
                earlier = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
            noted = [(row["job"], row["phase"]) for row in earlier]
            if repeated and (self.job, phase) in noted:
                return
            evaluated = sum(int(row["models"] or 1) for row in earlier)  # a torn line has none
            if evaluated + models > self.most_evaluations:
                raise ConfigError(
                    f"site {site}: its jobs have evaluated {evaluated} models on the test images "
                    f"of this data; bounds.evaluations in its {PLACE} allows "
                    f"{self.most_evaluations}"
                )
            row = {"time": _now(), "job": self.job, "phase": phase, "models": models}
            write_atomically(path, csv_text([*earlier, row], _COLUMNS).encode())

    def note_validations(self, metrics: int, site: str) -> None:
        """Note that so many metrics on validation images leave the site.

        Each metric answers a question about these images, which the server chooses by the model
        that it sends, for example whether a pixel of a patient is above a value.

        Raises:
            ConfigError: with these the data folder has more validations than the site allows.
        """
        with locked(self.folder / _LOCK):
            earlier = self._stored(VALIDATIONS, {}).get("models", 0)
            if earlier + metrics > self.most_validations:
                raise ConfigError(
                    f"site {site}: its jobs have reported {earlier} metrics on the validation "
                    f"images of this data; bounds.validations in its {PLACE} allows "
                    f"{self.most_validations}"
                )
            write_json(self.folder / VALIDATIONS, {"models": earlier + metrics})


def other_images_refusal(site: str) -> ConfigError:
    """The error for another selection, and for one that cannot be opened: two different errors
    would tell how many images it has.
    """
    return ConfigError(
        f"site {site}: an earlier job used other images, classes or splits of this data, and two "
        "such jobs would tell the numbers of single patients; use the label_values, "
        "unlisted_labels, resplit, unreadable and unreadable_limit of that job, or have the site "
        f"allow another selection by deleting its {SELECTION}. If the selection is the same, the "
        "site's log says what is wrong with its data"
    )


def _check_changed_patients(site: Site, earlier: _Used, present: _Used) -> None:
    """Raise ConfigError if a split differs from an earlier job's in a few patients only, or if the
    task reads the same patients' labels in another way.
    """
    is_other = earlier.get(_LABELS) != present[_LABELS]
    other_labels = is_other and site.minimum_patients > 1
    for name in SPLITS:
        for depth in range(1, 4):  # patients; with their images; with the labels
            before = {tuple(digests[:depth]) for digests in earlier[name]}
            after = {tuple(digests[:depth]) for digests in present[name]}
            changed = {patient for patient, *_ in before ^ after}
            fewest = 0 if other_labels and depth == 2 and after else 1
            if fewest <= len(changed) < site.minimum_patients:
                raise other_images_refusal(site.name) from ConfigError(
                    f"{FILE} has changed in {len(changed)} patients of '{name}', and counts of two "
                    f"jobs would tell theirs; change {site.minimum_patients} or more at once, or "
                    f"delete {SELECTION}"
                )


def _trained_patients(site: str) -> ConfigError:
    """The error for a split that validates or tests patients of an earlier job's training."""
    return ConfigError(
        f"site {site}: its {FILE} has changed, and patients of an earlier job's training would be "
        "validated or tested, which its privacy budget forbids; the site writes those under "
        f"'trained' in its {SELECTION} into the list 'training', and the task has no resplit. "
        "Without 'trained' this file is of an older version: the site deletes it when its lists "
        "are so"
    )


def _reading(task: TaskConfig) -> Json:
    return json.loads(json.dumps(reading_settings(task)))


def _unreadable(site: Site) -> list[Any]:
    limit = site.task.unreadable_limit
    return [site.task.unreadable, limit.share, limit.count]


def record_folder(records: Path, data: Path) -> Path:
    """The folder of a data folder's record below `records`: its name and a checksum of its path."""
    path = data.resolve()
    checksum = hashlib.sha256(str(path).encode()).hexdigest()
    return records / f"{path.name}-{checksum[:8]}"


def used_images_digest(site: Site) -> str:
    """A checksum of the images that a task uses, with their splits and labels.

    The labels of masks are the task's `label_values` and `unlisted_labels`; the names of labels and
    the size of images do not matter.
    """
    task = site.task
    content: JsonDict = {"kind": task.kind, "target": task.target}
    for name, images in _used_images(site).items():
        content[name] = [json.dumps(image) for image in images]
    if task.kind == "segmentation":
        content["labels"] = [task.label_values.get(label) for label in task.labels]
        content["unlisted"] = task.unlisted_labels
    return _digest(content)


def _used_images(site: Site) -> dict[str, list[list[Any]]]:
    """Split -> its images as [patient, file, labels]; a volume is listed once, a mask's labels are
    None.
    """
    used = {}
    for name in SPLITS:
        split = site.data.split(name)
        files = [_SLICE.sub("", image) for image in split.names]
        labels: list[Any] = [None] * len(files)
        if site.task.kind == "classification":
            labels = counts_by_image(split.targets, site.task).tolist()
        images = {json.dumps(image) for image in zip(split.patients, files, labels, strict=True)}
        used[name] = [json.loads(image) for image in sorted(images)]
    return used


def _digests_of_patients(site: Site) -> _Used:
    """Split -> digests of each patient, of the patient's images, and of their labels; `_LABELS` ->
    a digest of how the task reads labels.
    """
    task = site.task
    values = None  # several masks, or a list of 0 and 1
    if task.label_values or task.target != "multilabel":
        values = stored_values(task)
    reading = [task.kind, task.target, len(task.labels), values, task.unlisted_labels]
    used: _Used = {_LABELS: _digest(reading)}
    for name, images in _used_images(site).items():
        by_patient: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        for patient, file, labels in images:
            by_patient[patient].append((file, labels))
        used[name] = []
        for patient, of_patient in sorted(by_patient.items()):
            files = [file for file, _ in of_patient]
            parts = (patient, files, of_patient)
            used[name].append([_digest(part)[:16] for part in parts])
    return used


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
