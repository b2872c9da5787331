"""What pip does with the distribution of somebody else, without pip: files that Python finds in a folder of its path."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from medflare.core import extensions
from medflare.tasks import metrics_table

SOURCE = Path(__file__).parent / "damped_fedavg"
METHOD = "damped_fedavg"
LAB = "lab_extensions"
# Group -> name -> object of the package lab_extensions.
EXTENSIONS = {
    "losses": {"lab_poly": "PolyLoss"},
    "metrics": {"lab_confidence": "CONFIDENCE"},
    "transforms": {"lab_halved": "Halved", "lab_shifted": "RandShifted"},
    "optimizers": {"lab_sign": "SignSGD"},
    "networks": {"lab_cnn": "linear_cnn"},
    "adaptations": {"lab_sharper": "sharper"},
    "rules": {"lab_largest": "largest"},
    "readers": {"npy": "read_npy"},
}


def install(folder: Path) -> Path:
    """Put the package damped_fedavg and what describes its distribution into a folder.

    Returns:
        The folder: with it in PYTHONPATH (or sys.path, see `describe`) the method is found.
    """
    shutil.copytree(
        SOURCE, folder / METHOD, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    return describe(folder, "damped-fedavg", {METHOD: "damped_fedavg:METHOD"})


def install_extensions(folder: Path) -> Path:
    """Put the package lab_extensions and what describes its distribution into a folder, which is returned."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(__file__).parent / LAB, folder / LAB, ignore=ignored)
    groups: dict[str, dict[str, str]] = {}
    for group, names in EXTENSIONS.items():
        groups[group] = {name: f"{LAB}:{target}" for name, target in names.items()}
    return describe_groups(folder, "lab-extensions", groups)


def installed_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For a fixture: the folder of `install_extensions`, which this process finds and does not trust."""
    folder = install_extensions(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(extensions, "_trusted", set())
    monkeypatch.delenv(extensions.PACKAGES_VARIABLE, raising=False)
    forget_extensions()
    yield folder
    sys.modules.pop(LAB, None)
    forget_extensions()


def forget_extensions() -> None:
    """Read the entry points anew."""
    extensions._points.cache_clear()
    extensions._loaded.cache_clear()
    metrics_table._table.cache_clear()


def describe(folder: Path, distribution: str, methods: dict[str, str]) -> Path:
    """`describe_groups` of a distribution that brings methods."""
    return describe_groups(folder, distribution, {"methods": methods})


def describe_groups(
    folder: Path, distribution: str, groups: Mapping[str, Mapping[str, str]]
) -> Path:
    """Write the metadata of a distribution.

    Args:
        folder: where they go; returned.
        distribution: its name.
        groups: group -> name -> "module:object" of its entry points.
    """
    about = folder / f"{distribution.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n", encoding="utf-8"
    )
    lines: list[str] = []
    for group, points in groups.items():
        lines.append(f"[medflare.{group}]")
        lines += [f"{name} = {target}" for name, target in points.items()]
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
