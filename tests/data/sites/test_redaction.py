"""No name of a file or a patient leaves a site that says so, and the site can tell what its codes stand for."""

import json
from pathlib import Path

import pytest

from medflare.core.errors import DataError
from medflare.data.datalist import check_patients, read_datalist
from medflare.data.sites.redaction import Redaction

LISTED = {
    "training": [
        {"image": "scans/Meier_Anna/t1.nii.gz", "label": "scans/Meier_Anna/t1_mask.nii.gz", "patient": "Meier, Anna"},
        {"image": ["scans/K7/pre 1.nii.gz", None], "label": "masks/K7.nii.gz", "patient": 7, "ward": "North Wing"},
    ],
    "test": [{"image": "Huber.png", "label": "mask.png"}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "datalist.json").write_text(json.dumps(LISTED))
    return tmp_path


def test_names_become_codes(folder: Path) -> None:
    redaction = Redaction(folder)
    for text, expected in [
        (f"{folder}/scans/Meier_Anna/t1.nii.gz: cannot be read", "image-0001: cannot be read"),
        (f"{folder}/scans/K7/pre 1.nii.gz: file not found", "image-0002: file not found"),
        ("the mask is 3 x 4, its image Huber.png is 4 x 4", "the mask is 3 x 4, its image image-0003 is 4 x 4"),
        (f"{folder}/datalist.json test[1]: patient 7 is also in test[7]", "datalist.json test[1]: patient-0002 is also in test[7]"),
        ('File "/opt/medflare/x.py", line 3', 'File "/opt/medflare/x.py", line 3'),
        ("Meier, Anna and Meier_Anna and Huber", "patient-0001 and patient-0001 and patient-0003"),
        ("of North Wing", "of text-0002"),
        (f"{folder} holds /home/anna/secret.txt", "(data) holds (path)"),
        ("5 of 9 images, 3.5 mm/s and/or local/medflare.json", "5 of 9 images, 3.5 mm/s and/or local/medflare.json"),
        ("scans are in scans", "scans are in scans"),  # a folder of several patients names none
    ]:
        assert redaction.text(text) == expected


def test_a_mark_at_the_beginning_of_the_datalist_hides_no_name(folder: Path) -> None:
    """It is read as one without it, and so its names have to be known."""
    (folder / "datalist.json").write_text(json.dumps(LISTED), encoding="utf-8-sig")
    assert read_datalist(folder, "classification")[0].patient == "Meier, Anna" and Redaction(folder).text("Meier, Anna") == "patient-0001"


def test_the_table_maps_back(folder: Path) -> None:
    table = Redaction(folder).table
    assert table["image-0001"] == "scans/Meier_Anna/t1.nii.gz" and table["mask-0002"] == "masks/K7.nii.gz"
    assert table["patient-0001"] == "Meier, Anna" and table["patient-0002"] == "7" and table["patient-0003"] == "Huber.png"


def test_what_the_datalist_itself_is_refused_for(folder: Path) -> None:
    content = {**LISTED, "validation": [{"image": "scans/Meier_Anna/t2.nii.gz", "label": "m.nii.gz", "patient": "Meier, Anna"}]}
    (folder / "datalist.json").write_text(json.dumps(content))
    with pytest.raises(DataError) as raised:
        check_patients(read_datalist(folder, "segmentation"))
    assert "Meier" in str(raised.value)
    assert "Meier" not in Redaction(folder).text(str(raised.value))


def test_facts(folder: Path) -> None:
    facts = {
        "n": {"train": 2},
        "events": [{"kind": "left_out", "message": "Huber.png: damaged"}],
        "reports": {"deployed": {"best": "Huber.png", "count": 3}},
        "loss": 0.5,
    }
    assert Redaction(folder).facts(facts) == {
        "n": {"train": 2},
        "events": [{"kind": "left_out", "message": "image-0003: damaged"}],
        "reports": {"deployed": {"best": "image-0003", "count": 3}},
        "loss": 0.5,
    }
    assert Redaction(folder).facts({"loss": 1}) == {"loss": 1}


def _redaction(folder: Path, *entries: dict[str, object]) -> Redaction:
    (folder / "datalist.json").write_text(json.dumps({"training": [{"label": 0, **entry} for entry in entries]}))
    return Redaction(folder)


def test_a_code_is_never_taken_for_a_name(tmp_path: Path) -> None:
    """One text is read once: what came in for one patient is not replaced by another's code, and what stays is nobody's name."""
    patients = _redaction(tmp_path, {"image": "a.png", "patient": "patient-0002"}, {"image": "b.png", "patient": "patient-0001"})
    text = patients.text("patient patient-0002: bad; patient-0002 too; patient-0001 too")
    assert text == "patient-x0001: bad; patient-x0001 too; patient-x0002 too" == patients.text(text)
    files = _redaction(tmp_path, {"image": "Image-0002.png", "patient": "Anna"}, {"image": "image-0001.png", "patient": "Bert"})
    assert files.text(f"{tmp_path}/Image-0002.png: cannot be read") == "image-x0001: cannot be read"
    assert files.text(f"{tmp_path}/image-0001.png and image-0001") == "image-x0002 and patient-x0002"
    assert files.table["image-x0001"] == "Image-0002.png" and files.table["patient-x0002"] == "Bert"
    taken = _redaction(tmp_path, {"image": "mask-0001.png", "ward": ["text-x0001", "patient-xx12345"]}, {"image": "Huber.png"})
    assert taken.text("Huber.png of Huber") == "image-xxx0002 of patient-xxx0002"


def test_of_names_within_each_other_the_longest_counts_and_none_within_words(tmp_path: Path) -> None:
    redaction = _redaction(tmp_path, {"image": "a.png", "patient": "Anna"}, {"image": "b.png", "patient": "Anna Meier"})
    assert redaction.text("Anna Meier, Anna, Annabel, Anna_Meier") == "patient-0002, patient-0001, Annabel, patient-0001_Meier"
    assert redaction.text("Anna Meierhof") == "patient-0001 Meierhof"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"training": {}}', '{"training": [3, {"image": 5}]}'])
def test_a_datalist_that_cannot_be_read_leaves_paths_alone_redacted(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "datalist.json").write_text(content)
    redaction = Redaction(tmp_path)
    assert redaction.text(f"{tmp_path}/datalist.json: not valid; see /srv/x") == "datalist.json: not valid; see (path)"
    assert Redaction(None).text("/srv/scans/Meier.png: damaged") == "(path): damaged"
