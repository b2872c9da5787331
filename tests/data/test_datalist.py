import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import DataError
from medflare.data.datalist import LISTS, DatalistItem, assign_splits, check_patients, read_datalist


def _entries(**patients: list[str]) -> list[DatalistItem]:
    """Entries by split; one image per mention of a patient."""
    entries = []
    for split, names in patients.items():
        for number, patient in enumerate(names):
            path = Path(f"{split}{number}.png")
            place = f"datalist.json {split}[{number}]"
            entries.append(DatalistItem(path, 0, patient, split, place))
    return entries


def _homes(entries: list[DatalistItem]) -> dict[str, set[str]]:
    patients: dict[str, set[str]] = {split: set() for split in LISTS}
    for entry in entries:
        patients[entry.split].add(entry.patient)
    return patients


def test_patients_are_text_or_numbers_and_other_keys_are_ignored(tmp_path: Path) -> None:
    listed = [
        {"image": "a.png", "label": 1, "patient": 7},
        {"image": "b.png", "label": [0, 1], "patient": "7", "device": {"kV": 80}},
    ]
    (tmp_path / "datalist.json").write_text(json.dumps({"name": "of MONAI", "training": listed}))
    first, second = read_datalist(tmp_path, "classification")
    assert first.patient == second.patient == "7"
    assert first.label == 1 and second.label == [0, 1]
    assert first.location == f"{tmp_path / 'datalist.json'} training[0]"


@pytest.mark.parametrize("kind", ["image", "channel", "mask"])
@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/secret.png", "a/../../secret.png", "link.png"]
)
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
        (None, r"datalist\.json"),
        ("{", r"datalist\.json"),
        (json.dumps({"training": []}).encode("utf-16-le"), r"datalist\.json: .*UTF-8"),
        (b'{"training": [{"image": "images\\01.png"}]}', r"datalist\.json: .*write /"),
        ("[" * 100_000, r"datalist\.json"),
        ('{"train": []}', "training"),
        ('{"training": ["a.png"]}', r"training\[0\]"),
        ('{"training": [{"label": "m.png"}]}', "image"),
        ('{"training": [{"image": "a.png"}]}', "label"),
        ('{"training": [{"image": "a.png", "label": null}]}', "label"),
        ('{"training": [{"image": "a.png", "label": 1}]}', "label"),
        ('{"training": [{"image": "a.png", "label": ["m.png", 1]}]}', "label"),
        ('{"training": [{"image": "a.png", "label": "m.png", "patient": null}]}', "patient"),
        ('{"training": [{"image": "a\\u0000.png", "label": "m.png"}]}', r"training\[0\]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_lists_are_refused(
    tmp_path: Path, content: str | bytes | None, named: str
) -> None:
    if content is not None:
        (tmp_path / "datalist.json").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    with pytest.raises(DataError, match=named):
        read_datalist(tmp_path, "segmentation")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_lists_from_windows(tmp_path: Path, encoding: str) -> None:
    """With a byte order mark, Windows' line ends and names beyond ASCII."""
    listed = {"training": [{"image": "Müller_日本.png", "label": 0}]}
    text = json.dumps(listed, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    (tmp_path / "datalist.json").write_bytes(text.encode(encoding))
    assert read_datalist(tmp_path, "classification")[0].name == "Müller_日本.png"


@pytest.mark.parametrize("again", ["images/../images/a.png", "link.png"])
def test_an_image_listed_twice_by_other_names(tmp_path: Path, again: str) -> None:
    """As another patient in another split it would be tested on what was trained on."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").touch()
    (tmp_path / "link.png").symlink_to(tmp_path / "images/a.png")
    listed = {
        "training": [{"image": "images/a.png", "label": 0}],
        "test": [{"image": again, "label": 0, "patient": "q"}],
    }
    (tmp_path / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"test\[0\]"):
        check_patients(read_datalist(tmp_path, "classification"))


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), ("7", " 7"), ("1", "1.0"), (7, "7 ")])
def test_one_patient_however_the_number_is_written(
    one: object, other: object, tmp_path: Path
) -> None:
    """pandas makes 1.0 of 1 where a column has an empty cell."""
    listed = {
        "training": [{"image": "a.png", "label": 0, "patient": one}],
        "test": [{"image": "b.png", "label": 0, "patient": other}],
    }
    (tmp_path / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"patient [17]"):
        check_patients(read_datalist(tmp_path, "classification"))


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (("training",), {"training": 70, "validation": 10, "test": 20}),
        (("training", "test"), {"training": 88, "validation": 12}),  # 70 : 10
        (("training", "validation"), {"training": 78, "test": 22}),  # 70 : 20
    ],
)
def test_missing_splits_are_drawn_by_patient(
    listed: tuple[str, ...], expected: dict[str, int]
) -> None:
    others = {}
    for split in listed:
        if split != "training":
            others[split] = [f"{split}-{n}" for n in range(5)]
    entries = _entries(training=[f"p{n}" for n in range(100) for _ in range(2)], **others)
    drawn = assign_splits(entries, listed, "A")
    homes = _homes([entry for entry in drawn if entry.patient.startswith("p")])
    assert {split: len(patients) for split, patients in homes.items() if patients} == expected
    assert sum(map(len, homes.values())) == 100
    assert drawn == assign_splits(entries, listed, "A")
    assert drawn != assign_splits(entries, listed, "B")
    assert drawn != assign_splits(entries, listed, "A", resplit=1)
    few = assign_splits(_entries(training=["a", "b", "c"]), ("training",), "A")
    assert Counter(entry.split for entry in few) == {"training": 1, "validation": 1, "test": 1}


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        ({"training": ["a", "b", "b"]}, "site A"),  # two patients for three splits
        ({"validation": ["a"], "test": ["b"]}, "training"),
        ({"training": ["a"], "validation": ["b"], "test": ["a"]}, "patient a"),
    ],
)
def test_splits_that_cannot_be_made(listed: dict[str, list[str]], named: str) -> None:
    with pytest.raises(DataError, match=named):
        assign_splits(_entries(**listed), tuple(listed), "A")


def test_outside_sites_need_a_test_list_only() -> None:
    only_test = _entries(test=["a"])
    assert assign_splits(only_test, ("test",), "A", outside=True) == only_test
    used = assign_splits(_entries(training=["a", "b"]), ("training",), "A", outside=True)
    assert {entry.split for entry in used} == {"test"}


def test_resplit_keeps_proportions_and_patients_together() -> None:
    entries = _entries(
        training=[f"t{n}" for n in range(12) for _ in range(3)],
        validation=["v0", "v1"],
        test=["x0", "x1", "x2", "x2"],
    )
    drawn = [assign_splits(entries, LISTS, "A", resplit=seed) for seed in (0, 1)]
    for redrawn in drawn:
        homes = _homes(redrawn)
        assert {split: len(patients) for split, patients in homes.items()} == {
            "training": 12,
            "validation": 2,
            "test": 3,
        }
        assert sum(map(len, homes.values())) == 17
        assert [entry.image for entry in redrawn] == [entry.image for entry in entries]
    assert drawn[0] != drawn[1] and drawn[0] != entries
    assert drawn[1] == assign_splits(entries, LISTS, "A", resplit=1)


def test_a_slice_that_links_outside_the_sites_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "A"
    (folder / "ct").mkdir(parents=True)
    (folder / "ct" / "0.dcm").touch()
    (tmp_path / "1.dcm").touch()
    (folder / "ct" / "1.dcm").symlink_to(tmp_path / "1.dcm")
    listed = {"test": [{"image": "ct", "label": 0}]}
    (folder / "datalist.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"1\.dcm"):
        read_datalist(folder, "classification")
    assert len(read_datalist(folder, "classification", [tmp_path])) == 1


def test_a_patient_of_blanks_is_unknown(tmp_path: Path) -> None:
    """Else all such images are of one patient."""
    listed = [{"image": f"{name}.png", "label": 0, "patient": " "} for name in "ab"]
    (tmp_path / "datalist.json").write_text(json.dumps({"training": listed}))
    patients = [entry.patient for entry in read_datalist(tmp_path, "classification")]
    assert patients == ["a.png", "b.png"]
