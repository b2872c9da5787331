"""Downloads held against published checksums: what differs, what is missing, what is no list."""

from pathlib import Path

import pytest

import releases
from medflare.cli import main
from medflare.core.errors import ConfigError, DataError
from medflare.data.starting.papers.checksums import compare_checksums

ABC = {  # of the three bytes "abc": RFC 1321, appendix A.5, and FIPS 180-4's examples
    "md5": "900150983cd24fb0d6963f7d28e17f72",
    "sha1": "a9993e364706816aba3e25717850c26c9cd0d89d",
    "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    "sha512": "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
    "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
}
EMPTY = "d41d8cd98f00b204e9800998ecf8427e"  # MD5 of nothing, RFC 1321, appendix A.5


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """a.tiff at the top, b.tiff in a folder, both with "abc" in them; an empty file of a's name below."""
    for name, content in {"a.tiff": b"abc", "images/b.tiff": b"abc", "empty/a.tiff": b""}.items():
        path = tmp_path / "downloads" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "downloads"


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    return tmp_path / "sums.txt"


@pytest.mark.parametrize("algorithm", ABC)
@pytest.mark.parametrize("between", ["  ", " *"])
def test_the_number_of_digits_tells_the_algorithm(algorithm: str, between: str, downloads: Path, listing: Path) -> None:
    listing.write_text(f"# published\n{ABC[algorithm].upper()}{between}./a.tiff\n\n{ABC[algorithm]}{between}b.tiff\n")
    found = compare_checksums(listing, downloads, strict=True)
    assert found.render() == "checksums: 2 of 2 files are as published"


def test_a_file_at_its_place_is_the_one_that_is_meant(downloads: Path, listing: Path) -> None:
    listing.write_text(f"{ABC['md5']}  a.tiff\n{EMPTY}  empty/a.tiff\n")
    assert compare_checksums(listing, downloads).equal == 2
    (downloads / "a.tiff").unlink()  # of the name alone, only that in the folder is left, and it has other content
    with pytest.raises(DataError, match=r"empty/a.tiff: not the file whose checksum is in sums.txt; download again what differs$"):
        compare_checksums(listing, downloads)


def test_every_file_that_differs_is_counted(downloads: Path, listing: Path) -> None:
    listing.write_text(f"{EMPTY}  a.tiff\n{EMPTY}  b.tiff\n")
    with pytest.raises(DataError, match=r"downloads/a.tiff: not the file .+ in sums.txt, and 1 more; download again") as error:
        compare_checksums(listing, downloads)
    assert "\n" not in str(error.value)


def test_files_that_are_not_there_are_a_warning_or_an_error(downloads: Path, listing: Path) -> None:
    listing.write_text(f"{ABC['md5']}  b.tiff\n{EMPTY}  images/a.tiff\n{EMPTY}  c.zip\n")
    found = compare_checksums(listing, downloads)
    assert (found.listed, found.equal, found.missing) == (3, 1, ("images/a.tiff", "c.zip"))
    assert found.render().endswith("1 of 3 files are as published; WARNING: 2 not there, the first: images/a.tiff")
    with pytest.raises(DataError, match=r"downloads: 2 of 3 files of sums.txt are not there, the first: images/a.tiff$"):
        compare_checksums(listing, downloads, strict=True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "it lists no file"),
        ("no checksum at all\n", "line 1: 'no checksum at all' is no checksum with a name"),
        (f"{EMPTY[:-1]}  a.tiff\n", "line 1: .+ is no checksum with a name"),
        (f"{EMPTY}  a.tiff\n{ABC['md5']}  ./a.tiff\n", "line 2: a.tiff has another checksum above"),
        (f"{EMPTY}  elsewhere.zip\n", "none of its 1 files is in .+ the first: elsewhere.zip; give the list of these"),
    ],
)
def test_what_is_no_list_of_these_files_is_one_line(content: str, problem: str, downloads: Path, listing: Path) -> None:
    listing.write_text(content)
    with pytest.raises(ConfigError, match=problem) as error:
        compare_checksums(listing, downloads)
    assert "\n" not in str(error.value)
    listing.unlink()
    with pytest.raises(ConfigError, match="no list of checksums can be read there"):
        compare_checksums(listing, downloads)


def test_the_command_compares_before_it_writes(tmp_path: Path, listing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = releases.prostate(tmp_path / "downloads")
    volume = sorted(root.rglob("*.nii.gz"))[0].relative_to(root).as_posix()
    listing.write_text(f"{EMPTY}  {volume}\n")
    command = ["data", "prepare", "prostate", "--from", str(root), "--to", str(tmp_path / "DATA"), "--checksums", str(listing)]
    assert main(command) == 1
    assert f"{volume}: not the file whose checksum is in sums.txt" in capsys.readouterr().err and not (tmp_path / "DATA").exists()
    (root / "note.txt").write_bytes(b"abc")
    listing.write_text(f"{ABC['sha256']}  note.txt\n")
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("checksums: 1 of 1 files are as published\n")
