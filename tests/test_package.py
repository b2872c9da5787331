"""What is installed is whole, and the mistakes of the first minutes are one line each, before anything is trained."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import medflare
from helpers.small_tasks import tiny_grades
from medflare.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "code",
    [
        "import medflare; assert {'run_local', 'predict', 'load_model'} <= {*dir(medflare)}; heavy = {'torch'}",
        "import medflare.flare.executors; heavy = {'torch', 'monai', 'medflare.tasks.config'}",  # the simulator starts it for every task
        f"import medflare; medflare.run_local('fedavg', {tiny_grades()!r}, 1, rounds=1, seed=0); heavy = {{'monai'}}",
    ],
)
def test_what_processes_start_with_is_light(code: str) -> None:
    code = f"{code}; import sys; assert not heavy & set(sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"rounds": 0},
            "rounds is 0, which trains nothing, and task phantom starts from random weights; give 1 or more",
        ),
        ({"rounds": -1}, "rounds"),
        (
            {"sites": "clinic1,clinic2"},
            r"sites = 'clinic1,clinic2': give a list of site names, such as \['clinic1', 'clinic2'\]",
        ),
        ({"sites": 0}, "name at least one site"),
        ({"lr": 0.1}, r"setting of the task; did you mean task\.optimizer\.lr\?"),
    ],
)
def test_mistakes_of_the_first_minutes(settings: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"sites": 2, "rounds": 1, **settings}
    with pytest.raises(ConfigError, match=reason):
        medflare.run_local("fedavg", "phantom", given.pop("sites"), seed=0, **given)


def test_the_locked_versions_are_the_tested_ones() -> None:
    tested = set(
        re.findall(r"^[\w.-]+==[\w.]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    for file, package in (("requirements.lock", "nvflare"), ("requirements-torch.lock", "torch")):
        lock = (ROOT / file).read_text()
        (locked,) = re.findall(rf"^{package}==[\w.]+", lock, re.MULTILINE)
        assert locked in tested
        versions = re.findall(r"^\S+==.*\n(.*)", lock, re.MULTILINE)
        for following in versions:
            assert re.match(r"    --hash=sha256:[0-9a-f]{64}", following)


def test_actions_are_named_by_commit() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", workflow.read_text())
        assert used
        for action in used:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)


@pytest.mark.slow
def test_the_image_for_containers_has_the_presets(tmp_path: Path) -> None:
    for line in re.findall(
        r"^COPY (.+)$", (ROOT / "poc_workspace/runtime/Dockerfile").read_text(), re.MULTILINE
    ):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source,
                    tmp_path / target,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
                )
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "wheels",
        ".",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set()
        for name in archive.namelist():
            if "/presets/" in name:
                held.add(name.removeprefix("medflare/tasks/presets/"))
    assert held == {
        path.relative_to(ROOT / "app_configs").as_posix()
        for path in (ROOT / "app_configs").rglob("*.json")
    }
