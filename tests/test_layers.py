"""The rules that pyproject.toml states for imports, and their drawing in docs/architecture.md."""

import re
import subprocess
from pathlib import Path

from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parents[1]


def test_rooms_import_downwards_and_without_circles() -> None:
    linted = subprocess.run(["lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def test_the_architecture_page_draws_these_layers() -> None:
    contract = read_configuration(config_filename=str(ROOT / "pyproject.toml"))["contracts_options"][0]
    layers = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = page[page.index("## Rooms") :].split("\n## ")[0]
    drawn = [re.findall(r"\w+", head) for head in re.findall(r"^\| (`\w+/`(?:, `\w+/`)*)", block, flags=re.MULTILINE)]
    assert drawn == layers
