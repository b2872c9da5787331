"""What the documents promise exists: settings in the ablation tables, files that pages link to, commands that the README shows."""

import re
from pathlib import Path

import pytest

from medflare.cli import main
from medflare.methods.catalogue import METHODS, get_method

ROOT = Path(__file__).parents[1]
ABLATIONS = sorted((ROOT / "docs" / "ablations").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def settings_of(page: Path) -> list[str]:
    """Every `method name=value ...` on a page."""
    found = re.findall(r"`(\w+(?: \w+=[\w.+]+)*)`", page.read_text(encoding="utf-8"))
    return [row for row in found if row.split()[0] in METHODS]


@pytest.mark.parametrize("page", ABLATIONS, ids=lambda page: page.stem)
def test_every_row_of_an_ablation_table_is_a_setting(page: Path) -> None:
    rows = settings_of(page)
    assert len(rows) > 10
    for row in rows:
        name, *pairs = row.split()
        get_method(name).check(dict(pair.split("=", 1) for pair in pairs))


def test_every_paper_has_its_table() -> None:
    assert {page.stem for page in ABLATIONS} >= {"fedsm", "prr", "grace", "iop_fl", "feddag"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_commands_of_the_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = set(re.findall(r"^(?:MEDFLARE_DATA_ROOT=\S+ )?medflare (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert commands >= {"run", "job", "results", "data", "predict", "export"}
    for command in sorted(commands):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert command in capsys.readouterr().out
