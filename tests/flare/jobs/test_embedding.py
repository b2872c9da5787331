"""A job that carries its code carries the whole package and nothing else."""

import json
import os
from pathlib import Path

import pytest

import medflare
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.evaluation.presentation import format_bytes
from medflare.flare.jobs.building import build_job
from medflare.flare.jobs.embedding import size_of
from medflare.flare.recipes import FedSMRecipe

PACKAGE = Path(medflare.__file__).parent


def files(folder: Path) -> set[str]:
    """Relative paths; tasks/presets is a link to app_configs/ in a checkout, hence a walk that follows links."""
    walk = os.walk(folder, followlinks=True)
    return {os.path.relpath(os.path.join(place, name), folder) for place, _, names in walk for name in names}


def test_the_job_holds_the_package(tmp_path: Path) -> None:
    custom = build_job("fedsm", "phantom", out=tmp_path / "job", embed_code=True) / "app" / "custom"
    sources = {name for name in files(PACKAGE) if "__pycache__" not in name}
    assert files(custom) == {"README.md", *(f"medflare/{name}" for name in sources)}
    assert all((custom / "medflare" / name).read_bytes() == (PACKAGE / name).read_bytes() for name in sources)
    assert medflare.__version__ in (custom / "README.md").read_text()


def test_the_job_differs_in_nothing_else_but_the_event_files(tmp_path: Path) -> None:
    with_code, without = (build_job("fedsm", "phantom", out=tmp_path / str(embed), embed_code=embed) for embed in (True, False))
    for name in files(without) - {"app/custom/README.md", "app/config/config_fed_server.json"}:
        assert (with_code / name).read_bytes() == (without / name).read_bytes()
    carried, installed = (json.loads((job / "app/config/config_fed_server.json").read_text())["components"] for job in (with_code, without))
    assert [part for part in installed if part not in carried] == [part for part in installed if part["id"] == "tensorboard"]


def test_with_code_and_without_app_custom_is_a_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="choose one of the two"):
        build_job("fedsm", "phantom", out=tmp_path / "job", embed_code=True, byoc=False)
    assert main(["job", "fedsm", "--embed-code", "--no-byoc", "--out", str(tmp_path / "job")]) == 1
    said = capsys.readouterr().err.strip()
    assert "--embed-code" in said and "--no-byoc" in said and "\n" not in said
    assert not (tmp_path / "job").exists()


def test_the_command_says_how_large_the_job_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "fedavg", "--embed-code", "--out", str(tmp_path / "job")]) == 0
    assert f"job folder: {tmp_path / 'job'} ({format_bytes(size_of(tmp_path / 'job'))})" in capsys.readouterr().out
    assert size_of(PACKAGE / "core") < size_of(tmp_path / "job") < 3 * 2**20


def test_a_recipe_carries_the_code_too(tmp_path: Path) -> None:
    FedSMRecipe(task="phantom", num_rounds=1, embed_code=True).export(str(tmp_path))
    assert list(tmp_path.rglob("app/custom/medflare/flare/executors.py"))
