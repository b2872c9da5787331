"""What a site says about how many: no number of few patients leaves it as the difference of two jobs; test_every_method.py has one job."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.local import LocalSettings
from medflare.federation.data_record import DataRecord, used_images_digest
from medflare.federation.exchange import SiteReply
from medflare.federation.local import loop
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.local.loop import run_local
from medflare.federation.participant import Participant
from medflare.federation.suppression import has_small_cell, small_report
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.tasks.classes import Cases, class_report
from medflare.tasks.config import TaskConfig, UnreadableLimit
from medflare.training.opening import open_site

MINIMUM: Final = 5
SITES: Final = ("a", "b")
# Patients of each class by split, at each site: two training patients of class 2, three validation patients, and
# few patients in the cells of a confusion matrix.
PATIENTS: Final = {"training": (9, 8, 2), "validation": (2, 1, 0), "test": (8, 9, 0)}
NETWORK: Final = {"name": "small_cnn", "channels": [4, 8], "batch_norm": True}
SELECTED: Final = {"labels": ["dark", "medium"], "unlisted_labels": "drop"}
FIRST: Final = small_task(
    "classification",
    network=NETWORK,
    batch_size=8,
    label_values={"dark": [0], "medium": [1]},
    **SELECTED,
)
JOBS: Final = {
    "other classes": replace(FIRST, label_values={"dark": [0, 2], "medium": [1]}),
    "fewer classes": replace(FIRST, label_values={"dark": [0], "medium": [2]}),
    "another split": replace(FIRST, resplit=1),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey images with noise; the brightness is the class, but for a few test images, and patients are named."""
    root = tmp_path_factory.mktemp("counted")
    random = np.random.default_rng(0)
    for site in SITES:
        (root / site / "images").mkdir(parents=True)
        listed: dict[str, list[dict[str, Any]]] = {split: [] for split in PATIENTS}
        for split, counts in PATIENTS.items():
            for label, count in enumerate(counts):
                for number in range(count):
                    shade = 60 if split == "test" and number < 3 else 30 + 60 * label
                    name = f"images/{split}-{label}-{number}.png"
                    Image.fromarray(
                        (random.integers(0, 60, (16, 16)) + shade).astype(np.uint8)
                    ).save(root / site / name)
                    listed[split].append({"image": name, "label": label, "patient": name})
        (root / site / "datalist.json").write_text(json.dumps(listed))
    return root


@pytest.fixture
def replies(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(method, task) -> reason of failure, and every reply of the sites, whose settings and records are those of a kit."""
    make = Participant
    call = LocalExchange.__call__
    seen: list[tuple[str, Message]] = []

    def participant(name: str, *args: Any, **more: Any) -> Participant:
        record = DataRecord(tmp_path / name, data / name, "job", most_evaluations=1000)
        return make(
            name,
            *args,
            **{**more, "local": LocalSettings(minimum_patients=MINIMUM), "record": lambda: record},
        )

    def noted(
        exchange: LocalExchange, step: Step, outgoing: dict[str, Message]
    ) -> dict[str, SiteReply]:
        answered = call(exchange, step, outgoing)
        seen.extend(
            (step.phase, reply.message) for reply in answered.values() if reply.message is not None
        )
        return answered

    monkeypatch.setattr(loop, "Participant", participant)
    monkeypatch.setattr(LocalExchange, "__call__", noted)

    def run(method: str, task: Any) -> tuple[str | None, list[tuple[str, Message]]]:
        seen.clear()
        rounds = 2 * get_method(method).trains
        results = run_local(method, task, SITES, rounds=rounds, seed=1, data_root=data)
        return results["reason"], list(seen)

    return run


@pytest.mark.parametrize("method", ["fedavg", "fedsm", "fingerprint"])
@pytest.mark.parametrize("job", JOBS)
def test_a_second_job_selects_and_splits_as_the_first(method: str, job: str, replies: Any) -> None:
    assert replies("fedavg", FIRST)[0] is None
    reason, seen = replies(method, JOBS[job])
    assert reason is not None and "selection.json" in reason and not seen
    assert replies(method, replace(FIRST, name="renamed"))[0] is None, (
        "any job with the selection of the first one"
    )


def test_a_selection_that_cannot_be_opened_is_answered_as_another_one(
    data: Path, tmp_path: Path
) -> None:
    """Else a limit of unreadable images, bisected, tells how many images any selection has."""
    record = DataRecord(tmp_path / "record", data / "a", "one", 1000)
    invitation = Message({}, {"role": "inside", "sites": list(SITES)})

    def answer(task: TaskConfig) -> str:
        site = Participant(
            "a",
            lambda role: open_site("a", task, data_root=data),
            get_method("fedavg"),
            {},
            record=lambda: record,
        )
        with pytest.raises(Exception) as caught:
            site.reply("enrol", 0, invitation)
        return f"{type(caught.value).__name__} {caught.value}"

    nowhere = replace(FIRST, label_values={"dark": [0], "medium": [77]}, resplit=3)
    nothing = replace(FIRST, label_values={"dark": [66], "medium": [77]})
    limit = replace(FIRST, unreadable="skip", unreadable_limit=UnreadableLimit(0.5, 1))
    assert answer(nothing).startswith("DataError")
    record.fix_used_images(open_site("a", FIRST, data_root=data))
    lines = {answer(task) for task in (nowhere, nothing, limit, *JOBS.values())}
    assert len(lines) == 1 and "ConfigError" in lines.pop()


@pytest.mark.parametrize("private", [False, True])
def test_a_lead_can_correct_a_few_first_jobs(data: Path, tmp_path: Path, private: bool) -> None:
    """A site's refusal tells something of its counts, so that only a few selections are tried."""
    record = DataRecord(tmp_path / "record", data / "a", "one", 1000, private)
    first = open_site("a", FIRST, data_root=data)
    other = open_site("a", JOBS["another split"], data_root=data)
    for job in range(5):
        attempt = replace(record, job=f"refused {job}")
        attempt.fix_used_images(first)
        attempt.note_refusal()
        if private:
            break
        assert not record.is_fixed()
    attempt = replace(record, job="refused again")
    attempt.fix_used_images(first)
    attempt.note_refusal()
    assert record.is_fixed()
    with pytest.raises(ConfigError, match="earlier job"):
        replace(record, job="other").fix_used_images(other)


def _without(data: Path, site: str, split: str, count: int) -> None:
    """Take the first patients out of a split."""
    path = data / site / "datalist.json"
    listed = json.loads(path.read_text())
    listed[split] = listed[split][count:]
    path.write_text(json.dumps(listed))


def test_patients_come_and_go_in_groups(data: Path, tmp_path: Path) -> None:
    """Else the counts and metrics of two jobs tell the label of the one patient who was admitted between them."""
    changing = tmp_path / "data"
    shutil.copytree(data, changing)
    record = DataRecord(tmp_path / "record", changing / "a", "one", 1000)

    def enrol(job: str) -> None:
        site = open_site(
            "a", FIRST, data_root=changing, local=LocalSettings(minimum_patients=MINIMUM)
        )
        replace(record, job=job).fix_used_images(site)

    enrol("first")
    _without(changing, "a", "training", 1)
    with pytest.raises(ConfigError, match="an earlier job used other") as caught:
        enrol("one less")
    assert "1 patients of 'train'" in str(caught.value.__cause__), "what the site's log says"
    _without(changing, "a", "training", 4)
    enrol("five less")
    _without(changing, "a", "training", 4)
    with pytest.raises(ConfigError):
        enrol("four less than the second job")
    listed = json.loads((data / "a" / "datalist.json").read_text())
    listed["training"] = listed["training"][1:]
    (changing / "a" / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError):
        enrol("one less than the first job")
    listed = json.loads((data / "a" / "datalist.json").read_text())
    listed["test"][0]["label"] = 1
    (changing / "a" / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError):
        enrol("another label of one patient")
    shutil.copy(data / "a" / "datalist.json", changing / "a")
    enrol("as the first job")


def test_a_changed_datalist_is_no_leave_to_read_the_same_labels_in_another_way(
    data: Path, tmp_path: Path
) -> None:
    """Else a datalist that is written anew lets two jobs count the patients of a merged class."""
    changing = tmp_path / "data"
    shutil.copytree(data, changing)
    record = DataRecord(tmp_path / "record", changing / "a", "one", 1000)
    merged = replace(FIRST, label_values={"dark": [0, 2], "medium": [1]})
    turned = replace(FIRST, label_values={"dark": [1, 2], "medium": [0]})

    def enrol(job: str, task: TaskConfig) -> None:
        site = open_site("a", task, data_root=changing, local=LocalSettings(minimum_patients=2))
        replace(record, job=job).fix_used_images(site)

    enrol("first", merged)
    path = changing / "a" / "datalist.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    with pytest.raises(ConfigError, match="an earlier job used other"):
        enrol("other labels", turned)
    enrol("the same labels", merged)
    for split in ("training", "test"):
        _without(changing, "a", split, 2)
    with pytest.raises(ConfigError, match="an earlier job used other"):
        enrol("other labels of the validation patients", turned)
    _without(changing, "a", "validation", 2)
    enrol("other patients in all splits", turned)


def test_labels_with_their_values_are_the_same_as_without(data: Path, tmp_path: Path) -> None:
    changing = tmp_path / "data"
    shutil.copytree(data, changing)
    record = DataRecord(tmp_path / "record", changing / "a", "one", 1000)
    for job in ("first", "second"):
        values = {label: [number] for number, label in enumerate(FIRST.labels)}
        task = replace(FIRST, label_values=values if job == "first" else {})
        site = open_site("a", task, data_root=changing, local=LocalSettings(minimum_patients=2))
        replace(record, job=job).fix_used_images(site)
        _without(changing, "a", "training", 2)


def test_the_site_allows_another_selection(data: Path, tmp_path: Path) -> None:
    record = DataRecord(tmp_path / "record", data / "a", "one", 1000)
    first = open_site("a", FIRST, data_root=data)
    other = open_site("a", JOBS["another split"], data_root=data)
    record.fix_used_images(first)
    with pytest.raises(ConfigError, match="earlier job"):
        replace(record, job="two").fix_used_images(other)
    record.fix_used_images(first)
    (tmp_path / "record" / "selection.json").unlink()
    record.fix_used_images(other)
    assert json.loads((tmp_path / "record" / "selection.json").read_text())["job"] == "one"


def test_a_changed_datalist_begins_anew_but_with_a_privacy_budget_no_trained_patient_is_tested(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    datalist = folder / "datalist.json"
    first = open_site("a", FIRST, data_root=data)
    other = open_site("a", JOBS["another split"], data_root=data)
    for private in (False, True):
        datalist.write_text("{}")
        record = DataRecord(tmp_path / str(private), folder, "job", 1000, private)
        record.fix_used_images(first)
        datalist.write_text('{"more": 1}')
        if not private:
            record.fix_used_images(other)
            continue
        with pytest.raises(ConfigError, match="privacy budget forbids"):
            record.fix_used_images(other)
        record.fix_used_images(first)
        datalist.write_text('{"more": 2}')
        with pytest.raises(ConfigError, match="privacy budget forbids"):
            record.fix_used_images(other)
        selection = tmp_path / "True" / "selection.json"
        noted = json.loads(selection.read_text())
        assert set(noted.pop("trained")) == set(first.data.train.patients)
        selection.write_text(json.dumps(noted))  # as of an older version
        with pytest.raises(ConfigError, match="privacy budget forbids"):
            record.fix_used_images(first)
        datalist.write_text('{"more": 1}')
        record.fix_used_images(first)
        datalist.write_text('{"more": 2}')
        record.fix_used_images(first)


def test_names_of_classes_sizes_and_networks_are_no_selection(data: Path) -> None:
    values = {"a": [0], "b": [1]}
    same = replace(
        FIRST, labels=("a", "b"), label_values=values, size=(8, 8), batch_size=2, local_epochs=2
    )
    digests = [
        used_images_digest(open_site("a", task, data_root=data))
        for task in (FIRST, same, *JOBS.values())
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 4


def test_a_matrix_with_a_small_cell_and_a_report_with_a_small_count() -> None:
    """Nine patients; one of six with class 0 is predicted as class 1."""
    scores = torch.tensor([[0.9, 0.1]] * 5 + [[0.2, 0.8]] * 4, dtype=torch.float64)
    cases = Cases("abcdefghi", {}, scores, torch.tensor([0] * 6 + [1] * 3))
    task = small_task("classification", labels=["dark", "bright"])
    assert class_report(cases, task.target, task.labels)["confusion"] == [[[5, 1], [0, 3]]]
    assert (
        has_small_cell(cases, task, 4)
        and has_small_cell(cases, task, 2)
        and not has_small_cell(cases, task, 1)
    )
    several = replace(cases, patients="aaaaaaaaa")
    assert has_small_cell(several, task, 2), "cells count patients, not images"
    assert small_report({"site-1": 4, "selector": {"site-2": 9}}, 5) and small_report(
        {"selector": {"site-2": 1}}, 5
    )
    assert not small_report(
        {"site-1": 0, "selector": {"site-2": 9}, "loss": [1, 2], "rate": 0.5}, 5
    )


def test_brackets_in_the_name_of_a_file_are_no_slice(data: Path) -> None:
    site = open_site("a", FIRST, data_root=data)
    digests = set()
    for names in (
        ("scan[1].png", "scan[2].png"),
        ("scan[1].png", "scan[3].png"),
        ("scan.nii[1]", "scan.nii[2]"),
        ("scan.nii[3]", "scan.nii[0]"),
    ):
        split = replace(site.data.train, names=(*names, *site.data.train.names[2:]))
        site.data = replace(site.data, train=split)
        digests.add(used_images_digest(site))
    assert len(digests) == 3
