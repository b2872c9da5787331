import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import DataError
from medflare.data.datalist import SPLITS, DatalistItem, assign_splits, check_patients, read_content, read_datalist, site_name


def _entries(**patients: list[str]) -> list[DatalistItem]:
    """Entries by split; one image per mention of a patient."""
    return [
        DatalistItem(Path(f"{split}{number}.png"), 0, patient, split, f"datalist.json {split}[{number}]")
        for split, names in patients.items()
        for number, patient in enumerate(names)
    ]


def _homes(entries: list[DatalistItem]) -> dict[str, set[str]]:
    homes: dict[str, set[str]] = {split: set() for split in SPLITS}
    for entry in entries:
        homes[entry.split].add(entry.patient)
    return homes


def test_reading(make_site: Callable[..., Path]) -> None:
    folder = make_site({"training": ["a", "a"], "test": ["b"]})
    entries = read_datalist(folder, "segmentation")
    assert [(entry.patient, entry.split) for entry in entries] == [("a", "training"), ("a", "training"), ("b", "test")]
    assert entries[0].image == folder / "images/0.png" and entries[0].label == folder / "images/0_mask.png"


def test_a_site_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the folder that a link leads to; where a path ends without a name, as the folder that it means."""
    (tmp_path / "store" / "images").mkdir(parents=True)
    (tmp_path / "berlin").symlink_to(tmp_path / "store" / "images")
    monkeypatch.chdir(tmp_path / "store" / "images")
    places = (tmp_path / "berlin", Path(), Path(".."), tmp_path / "berlin" / "..")
    assert [site_name(place) for place in places] == ["berlin", "images", "store", "store"]


def test_without_patients_every_image_is_a_patient(make_site: Callable[..., Path], edit: Callable[..., None]) -> None:
    folder = make_site()
    edit(folder, lambda content: [entry.pop("patient") for split in content.values() for entry in split])
    assert len({entry.patient for entry in read_datalist(folder, "segmentation")}) == 10


def test_patients_are_text_or_numbers_and_other_keys_are_ignored(tmp_path: Path) -> None:
    listed = [{"image": "a.png", "label": 1, "patient": 7}, {"image": "b.png", "label": [0, 1], "patient": "7", "device": {"kV": 80}}]
    (tmp_path / "datalist.json").write_text(json.dumps({"name": "of MONAI", "training": listed}))
    first, second = read_datalist(tmp_path, "classification")
    assert first.patient == second.patient == "7"
    assert first.label == 1 and second.label == [0, 1]
    assert first.place == f"{tmp_path / 'datalist.json'} training[0]"


@pytest.mark.parametrize("kind", ["image", "channel", "mask"])
@pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "a/../../secret.png", "link.png"])
def test_files_outside_the_sites_folder_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    folder = tmp_path / "A"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    images: dict[str, Any] = {"image": name, "channel": ["a.png", name], "mask": "a.png"}
    listed = {"image": images[kind], "label": name if kind == "mask" else "m.png"}
    (folder / "datalist.json").write_text(json.dumps({"training": [listed]}))
    with pytest.raises(DataError, match=r"secret\.png|link\.png"):
        read_datalist(folder, "segmentation")
    assert len(read_datalist(folder, "segmentation", [tmp_path, Path("/etc")])) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", r"datalist\.json"),
        ("[]", "training"),
        ('{"train": []}', "training"),
        ('{"training": {}}', "training"),
        ('{"training": ["a.png"]}', r"training\[0\]"),
        ('{"training": [{"label": "m.png"}]}', "image"),
        ('{"training": [{"image": 3, "label": "m.png"}]}', "image"),
        ('{"training": [{"image": "a.png"}]}', "label"),
        ('{"training": [{"image": "a.png", "label": null}]}', "label"),
        ('{"training": [{"image": "a.png", "label": 1}]}', "label"),
        ('{"training": [{"image": "a.png", "label": []}]}', "label"),
        ('{"training": [{"image": "a.png", "label": ["m.png", 1]}]}', "label"),
        ('{"training": [{"image": "a.png", "label": "m.png", "patient": null}]}', "patient"),
        ('{"training": [{"image": "a.png", "label": "m.png", "patient": true}]}', "patient"),
    ],
)
def test_malformed_lists_are_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "datalist.json").write_text(content)
    with pytest.raises(DataError, match=named):
        read_datalist(tmp_path, "segmentation")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_lists_from_windows(tmp_path: Path, encoding: str) -> None:
    """With a byte order mark, Windows' line ends and names beyond ASCII."""
    listed = {"training": [{"image": "Müller_日本.png", "label": 0}]}
    text = json.dumps(listed, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    (tmp_path / "datalist.json").write_bytes(text.encode(encoding))
    assert read_datalist(tmp_path, "classification")[0].name == "Müller_日本.png"


def test_backslashes_are_no_folders(tmp_path: Path) -> None:
    """Not with missing_channels "zeros" either, where a file that does not exist would become zeros without a word."""
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [{"image": ["images\\0.png", None], "label": 0}]}))
    with pytest.raises(DataError, match=r"training\[0\]"):
        read_datalist(tmp_path, "classification")
    (tmp_path / "images\\0.png").touch()
    assert read_datalist(tmp_path, "classification")[0].name == "images\\0.png", "a name may hold one all the same"


@pytest.mark.parametrize("content", [None, json.dumps({"training": []}).encode("utf-16"), b"[" * 100_000])
def test_unreadable_lists_are_errors(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "datalist.json").write_bytes(content)
    with pytest.raises(DataError, match=r"datalist\.json"):
        read_datalist(tmp_path, "classification")


@pytest.mark.parametrize("image", ["a" * 5000, "a\0.png"])
def test_impossible_file_names_are_errors(image: str, tmp_path: Path) -> None:
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [{"image": image, "label": 0}]}))
    with pytest.raises(DataError, match=r"training\[0\]") as error:
        read_datalist(tmp_path, "classification")
    assert len(str(error.value)) < 1000


def test_a_patient_in_two_splits() -> None:
    with pytest.raises(DataError, match="patient a"):
        assign_splits(_entries(training=["a"], validation=["b"], test=["a"]), SPLITS, "A")


@pytest.mark.parametrize("again", ["images/../images/a.png", "link.png"])
def test_an_image_listed_twice_by_other_names(tmp_path: Path, again: str) -> None:
    """As another patient in another split it would be tested on what was trained on."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").touch()
    (tmp_path / "link.png").symlink_to(tmp_path / "images/a.png")
    listed = {"training": [{"image": "images/a.png", "label": 0}], "test": [{"image": again, "label": 0, "patient": "q"}]}
    (tmp_path / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"test\[0\]"):
        check_patients(read_datalist(tmp_path, "classification"))


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), ("7", " 7"), ("1", "1.0"), (7, "7 ")])
def test_one_patient_however_the_number_is_written(one: object, other: object, tmp_path: Path) -> None:
    """pandas makes 1.0 of 1 where a column has an empty cell."""
    listed = {"training": [{"image": "a.png", "label": 0, "patient": one}], "test": [{"image": "b.png", "label": 0, "patient": other}]}
    (tmp_path / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"patient [17]"):
        check_patients(read_datalist(tmp_path, "classification"))


def _channels(*files: list[str | None]) -> list[DatalistItem]:
    """Images of as many patients, with a file for each channel."""
    paths = [tuple(None if name is None else Path(name) for name in names) for names in files]
    return [
        DatalistItem(next(filter(None, paths_)), 0, f"p{n}", "training", f"datalist.json training[{n}]", paths_)
        for n, paths_ in enumerate(paths)
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [(["t1", "t2"], ["t2", "t1"]), (["t1", "t2"], [None, "t2"]), ([None, "t2"], ["t1", "t2"]), (["t1", "a"], ["t1", "b"])],
)
def test_an_image_that_is_part_of_another(first: list[str | None], second: list[str | None]) -> None:
    with pytest.raises(DataError, match=r"image t[12]"):
        check_patients(_channels(first, second))


def test_images_may_share_a_channel() -> None:
    """A blank volume for what was not taken, or an atlas; and one file may be two channels of one image."""
    check_patients(_channels(["a", "blank"], ["b", "blank"], [None, "c"], ["d", "d"]))


def test_an_image_listed_twice() -> None:
    entries = _entries(training=["a", "a"])
    entries[1] = DatalistItem(entries[0].image, 0, "a", "training", "datalist.json training[1]")
    with pytest.raises(DataError, match=r"training\[1\]"):
        assign_splits(entries, ("training",), "A")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (("training",), {"training": 70, "validation": 10, "test": 20}),
        (("training", "test"), {"training": 88, "validation": 12}),  # 70 : 10
        (("training", "validation"), {"training": 78, "test": 22}),  # 70 : 20
    ],
)
def test_missing_splits_are_drawn_by_patient(listed: tuple[str, ...], expected: dict[str, int]) -> None:
    given = {split: [f"{split}-{n}" for n in range(5)] for split in listed if split != "training"}
    entries = _entries(training=[f"p{n}" for n in range(100) for _ in range(2)], **given)
    drawn = assign_splits(entries, listed, "A")
    homes = _homes([entry for entry in drawn if entry.patient.startswith("p")])
    assert {split: len(patients) for split, patients in homes.items() if patients} == expected
    assert sum(map(len, homes.values())) == 100
    assert drawn == assign_splits(entries, listed, "A")
    assert drawn != assign_splits(entries, listed, "B")
    assert drawn != assign_splits(entries, listed, "A", resplit=1)


def test_few_patients() -> None:
    drawn = assign_splits(_entries(training=["a", "b", "c"]), ("training",), "A")
    assert Counter(entry.split for entry in drawn) == {"training": 1, "validation": 1, "test": 1}
    with pytest.raises(DataError, match="site A"):
        assign_splits(_entries(training=["a", "b", "b"]), ("training",), "A")


def test_no_training_list() -> None:
    with pytest.raises(DataError, match="training"):
        assign_splits(_entries(validation=["a"], test=["b"]), ("validation", "test"), "A")


def test_outside_sites_need_a_test_list_only() -> None:
    only_test = _entries(test=["a"])
    assert assign_splits(only_test, ("test",), "A", outside=True) == only_test
    used = assign_splits(_entries(training=["a", "b"]), ("training",), "A", outside=True)
    assert {entry.split for entry in used} == {"test"}


def test_resplit_keeps_proportions_and_patients_together() -> None:
    entries = _entries(training=[f"t{n}" for n in range(12) for _ in range(3)], validation=["v0", "v1"], test=["x0", "x1", "x2", "x2"])
    drawn = [assign_splits(entries, SPLITS, "A", resplit=seed) for seed in (0, 1)]
    for redrawn in drawn:
        homes = _homes(redrawn)
        assert {split: len(patients) for split, patients in homes.items()} == {"training": 12, "validation": 2, "test": 3}
        assert sum(map(len, homes.values())) == 17
        assert [entry.image for entry in redrawn] == [entry.image for entry in entries]
    assert drawn[0] != drawn[1] and drawn[0] != entries
    assert drawn[1] == assign_splits(entries, SPLITS, "A", resplit=1)


def test_real_lists_keep_patients_apart(shared_data: Callable[[str], Path]) -> None:
    for federation, kind in (("brain_lgg", "segmentation"), ("ham10000", "classification"), ("fundus_vessels", "segmentation")):
        for folder in sorted(shared_data(federation).glob("*/")):
            entries = read_datalist(folder, kind)
            assert assign_splits(entries, tuple(read_content(folder)), folder.name) == entries
            content: dict[str, Any] = json.loads((folder / "datalist.json").read_text())
            assert len(entries) == sum(len(content[split]) for split in SPLITS)
