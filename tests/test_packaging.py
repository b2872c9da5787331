"""What is installed is whole: presets and suites lie outside the package's folder, behind a link."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_image_for_containers_has_the_presets(tmp_path: Path) -> None:
    """Built of what the Dockerfile copies and nothing else."""
    for line in re.findall(r"^COPY (.+)$", (ROOT / "poc_workspace/runtime/Dockerfile").read_text(), re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "."]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name.removeprefix("medflare/tasks/presets/") for name in archive.namelist() if "/presets/" in name}
    assert held == {path.relative_to(ROOT / "app_configs").as_posix() for path in (ROOT / "app_configs").rglob("*.json")}
