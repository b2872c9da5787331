"""What CONTRIBUTING has one write to add a method, written where it says, works: in this tree and in a distribution of one's own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreign.install import describe

ROOT = Path(__file__).parents[1]
SECTION = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .split("\n## Add a method\n")[1]
    .split("\n## ")[0]
)
IN_THE_TREE, ELSEWHERE = SECTION.split("\n### ")
HELPERS = (
    "conftest.py",
    "helpers/fixture_types.py",
    "helpers/picture_sites.py",
    "helpers/small_tasks.py",
    "foreign",
    "methods/conftest.py",
    "methods/squares.py",
    "methods/test_catalogue.py",
)
# The commands are tried, not their results.
EASY = ("--set", "task.size=[16, 16]", "--set", "task.batch_size=32")


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def places(text: str) -> list[Path]:
    """The files that the text has one make, in order."""
    return list(map(Path, re.findall(r"into\s`((?:custom|tests)/[\w/]+\.py)`", text)))


def process(*command: str, folder: Path, path: str) -> "subprocess.CompletedProcess[str]":
    """A process of this Python in a folder, with PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tree, as far as methods and their tests need it, with the files of the section."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "custom", copy / "custom", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in HELPERS:
        source = ROOT / "tests" / name
        target = copy / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    codes = blocks(IN_THE_TREE, "python")
    assert len(codes) == len(places(IN_THE_TREE)) == 2
    for place, code in zip(places(IN_THE_TREE), codes, strict=True):
        (copy / place).parent.mkdir(parents=True, exist_ok=True)
        assert not (ROOT / place).exists(), "an example must not take the place of what is there"
        (copy / place).write_text(code, encoding="utf-8")
    yield copy
    shutil.rmtree(copy)


@pytest.mark.slow
def test_the_method_and_its_test_pass_as_they_stand(tree: Path) -> None:
    own = str(places(IN_THE_TREE)[1])
    ours = "tests/methods/test_catalogue.py"
    ran = process("pytest", "-q", own, ours, "-k", "proximal", folder=tree, path="custom")
    assert ran.returncode == 0 and "4 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
def test_its_commands_run(tree: Path, tmp_path: Path) -> None:
    """One after the other in one process, which imports torch and MONAI once."""
    commands: list[list[str]] = []
    for line in "".join(blocks(IN_THE_TREE, "console")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "medflare"
        if arguments[0] == "run":
            arguments += [*EASY, "--out", str(tmp_path / f"out{len(commands)}")]
        commands.append(arguments)
    assert len(commands) == 3
    (tree / "commands.py").write_text(
        f"from medflare.cli import main\nfor command in {commands}:\n"
        "    print('##', command)\n    assert main(command) == 0, command\n"
    )
    ran = process("commands", folder=tree, path="custom")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    _, *outputs = ran.stdout.split("## ")
    printed = [output.partition("\n")[2] for output in outputs]
    assert len(printed) == 3, ran.stdout
    for output in printed:
        assert "proximal" in output, ran.stdout


@pytest.mark.slow
def test_the_code_keeps_the_rules_of_the_house(tree: Path) -> None:
    files = list(map(str, places(IN_THE_TREE)))
    assert files
    for place in files:
        for line in (tree / place).read_text(encoding="utf-8").splitlines():
            assert len(line) <= 140
    for check in (("ruff", "check"), ("ruff", "format", "--check")):
        ran = process(*check, *files, folder=tree, path="custom")
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_the_same_file_works_in_a_distribution_of_ones_own(tmp_path: Path) -> None:
    (points,) = blocks(ELSEWHERE, "toml")
    group, line = points.strip().splitlines()
    assert group == '[project.entry-points."medflare.methods"]'
    name, target = re.fullmatch(r'(\w+) = "([\w.]+:METHOD)"', line).groups()  # type: ignore[union-attr]
    place = Path(*target.split(":")[0].split(".")).with_suffix(".py")
    assert f"`{place}`" in ELSEWHERE, "the file and the entry point name one place"
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(blocks(IN_THE_TREE, "python")[0], encoding="utf-8")
    describe(tmp_path, "our-methods", {name: target})
    path = os.pathsep.join([str(ROOT / "custom"), str(tmp_path)])
    ran = process(
        "medflare.cli",
        "run",
        name,
        "--sites",
        "2",
        "--rounds",
        "1",
        "--engine",
        "local",
        *EASY,
        folder=tmp_path,
        path=path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f'"{place.parts[0]}"' in ELSEWHERE, "what a hospital adds to its packages"
