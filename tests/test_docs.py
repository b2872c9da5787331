"""What the documents promise exists: settings, files, commands, code that CONTRIBUTING has one write, layers, versions, examples."""

import csv
import doctest
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from importlinter.api import read_configuration

import medflare
from cli.parsing import parsed
from medflare.cli import main
from medflare.methods.catalogue import get_method, method_names
from medflare.networks.catalogue import NETWORKS, build_network
from medflare.tasks.config import load_task
from test_contributing import blocks

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "tests" / "reference"
METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
# Rows of the papers' tables, at least.
ROWS = {"fedsm": 19, "prr": 28, "grace": 31, "iop_fl": 26, "feddag": 21}
PACKAGE = ROOT / "custom" / "medflare"
WITH_EXAMPLES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")
]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    REFERENCE / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """The part of a page below a heading of the second level."""
    return read(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def settings_in(text: str) -> list[str]:
    """Every `method name=value ...` in a text."""
    actual = re.findall(r"`(\w+(?: [\w.]+=[\w.,+-]+)*)`", text)
    return [row for row in actual if row.split()[0] in method_names()]


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_every_row_of_an_ablation_table_is_a_setting(page: Path) -> None:
    for row in settings_in(page.read_text(encoding="utf-8")):
        name, *pairs = row.split()
        get_method(name).check(dict(pair.split("=", 1) for pair in pairs))


@pytest.mark.parametrize("paper", ROWS)
def test_every_paper_has_its_table(paper: str) -> None:
    assert len(settings_in(section(f"docs/methods/{paper}.md", "Ablations"))) >= ROWS[paper]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_generated_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    hooks = importlib.import_module("docs_hooks")
    assert {name: made() for name, made in hooks.WRITTEN.items()} == {
        name: read("docs", name) for name in hooks.WRITTEN
    }


def test_shortcuts_between_folders_lead_somewhere() -> None:
    actual = []
    for folder in ("custom", "poc_workspace", "app_configs"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_symlink():
                actual.append(path)
    assert actual and [path for path in actual if not path.exists()] == []


def test_commands_of_the_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = set(re.findall(r"(?:^|&& )medflare (\w+)", read("README.md"), re.MULTILINE))
    assert commands >= {"run", "job", "results", "data", "predict", "export"}
    for command in sorted(commands):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert command in capsys.readouterr().out


def test_the_patients_of_the_readme_are_those_of_the_synthetic_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "FOLDER")
    (command,) = re.findall(r"^medflare (data init FOLDER .*?)  #", read("README.md"), re.MULTILINE)
    assert "`medflare data phantom FOLDER`" in read("README.md")
    assert main(["data", "phantom", folder]) == 0
    words = [folder if word == "FOLDER" else word for word in shlex.split(command)]
    assert main([*words[:-1], str(tmp_path / "DATA")]) == 0
    assert len(list(tmp_path.glob("DATA/*/datalist.json"))) == 3, capsys.readouterr().err


def test_the_python_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(read("README.md"), "python")
    assert "medflare data phantom photographs" in code
    monkeypatch.chdir(tmp_path)
    assert main(["data", "phantom", "photographs"]) == 0
    images = {path.stem for path in (tmp_path / "photographs/images").glob("*.png")}
    capsys.readouterr()
    exec(compile(code.replace("rounds=10", "rounds=1"), "README.md", "exec"), {})
    output = capsys.readouterr().out
    assert re.findall(r"^(site-\d (?:in|out)side) 0\.\d+$", output, re.MULTILINE) == [
        "site-1 inside",
        "site-2 inside",
        "site-3 outside",
    ]
    predicted = [
        row["image"]
        for row in csv.DictReader((tmp_path / "predictions/predictions.csv").open(encoding="utf-8"))
    ]
    assert {Path(name).stem for name in predicted} == images


def test_commands_of_the_deployment_page_exist() -> None:
    commands = blocks(read("docs/deployment.md"), "(?:bash|console)")
    lines = []
    for block in commands:
        for line in block.splitlines():
            lines.append(shlex.split(line, comments=True))
    ours = [words[1:] for words in lines if words[0] == "medflare"]
    assert len(ours) >= 12
    for words in ours:
        assert parsed(words)
    scripts = set()
    for words in lines:
        for word in words:
            if re.fullmatch(r"poc_workspace/\w+\.(sh|py|yml)", word):
                scripts.add(word)
    assert (
        len(scripts) >= 5
        and [script for script in sorted(scripts) if not (ROOT / script).exists()] == []
    )


def test_reference_numbers_are_described() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|", (REFERENCE / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(rows) == {path.stem for path in REFERENCE.glob("*.npz")}


def test_the_version_is_named_right_where_it_must_be_repeated() -> None:
    pages = [
        *sorted((ROOT / "poc_workspace" / "runtime").iterdir()),
        ROOT / "docs" / "deployment.md",
    ]
    tags = {
        path.name: set(re.findall(r"medflare:(\d[\w.]*)", path.read_text(encoding="utf-8")))
        for path in pages
    }
    assert {name: actual for name, actual in tags.items() if actual - {medflare.__version__}} == {}


def test_the_site_has_a_page_for_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "custom" / "medflare").glob("*/__init__.py")}
    assert set(re.findall(r"api/(\w+)\.md", read("mkdocs.yml"))) == rooms


def test_hooks_run_what_continuous_integration_runs() -> None:
    groups = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    local = []
    for group in groups:
        if group["repo"] == "local":
            local += group["hooks"]
    commands = [hook["entry"].split() for hook in local]
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    assert {arguments[0] for tool, *arguments in commands if tool == "make"} <= targets
    assert {tool for tool, *_ in commands} == {"make", ".venv/bin/ruff"}
    revisions = [group["rev"] for group in groups if group["repo"] != "local"]
    for revision in revisions:
        assert re.fullmatch(r"[0-9a-f]{40}", revision)
    assert "exec make test" in read(".ci", "run")


def test_add_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    code, line, row = blocks(section("CONTRIBUTING.md", "Add a network"), "python")
    module: dict[str, Any] = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), module)
    name, function = re.findall(r'^"(\w+)": classifiers\.(\w+),$', line, re.MULTILINE)[0]
    monkeypatch.setitem(NETWORKS, name, module[function])
    ((spec, width),) = eval(f"[{row}]")
    features, logits = build_network(spec, 3, 5).features_and_output(torch.zeros(2, 3, 32, 32))
    assert features.shape == (2, width) and logits.shape == (2, 5)


def test_the_example_of_a_task(tmp_path: Path) -> None:
    block = blocks(read("docs/task.md"), "json")[0]
    path = tmp_path / f"{json.loads(block)['name']}.json"
    path.write_text(block, encoding="utf-8")
    task = load_task(path)
    logits = build_network(task.network, task.image_channels, task.outputs)(
        torch.zeros(2, task.image_channels, *task.size)
    )
    assert task.probabilities(logits).shape[:2] == (2, len(task.labels))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_print_what_they_say(path: Path) -> None:
    module = importlib.import_module(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    )
    failed, attempted = doctest.testmod(
        module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert attempted > 0 == failed


def test_rooms_import_downwards_and_without_circles() -> None:
    linted = subprocess.run(
        ["lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout


def test_the_architecture_page_draws_these_layers() -> None:
    contract = read_configuration(config_filename=str(ROOT / "pyproject.toml"))[
        "contracts_options"
    ][0]
    layers = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    heads = re.findall(
        r"^\| (`\w+/`(?:, `\w+/`)*)", section("docs/architecture.md", "Rooms"), flags=re.MULTILINE
    )
    assert [re.findall(r"\w+", head) for head in heads] == layers


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    """A path may begin at the package or in a room that the page has named before."""
    paths = []
    for folder in ("custom", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            paths.append(f"/{path.relative_to(ROOT).as_posix()}")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", read(page)))
    written_by_the_reader = {name for name in named if "proximal" in name}
    missing = []
    for name in sorted(named - written_by_the_reader):
        if not any(path.endswith(f"/{name}") for path in paths):
            missing.append(name)
    assert named and not missing
