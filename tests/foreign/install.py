"""What pip does with the distribution of somebody else, without pip: files that Python finds in a folder of its path."""

import shutil
from pathlib import Path

SOURCE = Path(__file__).parent / "damped_fedavg"
METHOD = "damped_fedavg"


def install(folder: Path) -> Path:
    """Put the package damped_fedavg and what describes its distribution into a folder.

    Returns:
        The folder: with it in PYTHONPATH (or sys.path, see `describe`) the method is found.
    """
    shutil.copytree(
        SOURCE, folder / METHOD, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    return describe(folder, "damped-fedavg", {METHOD: "damped_fedavg:METHOD"})


def describe(folder: Path, distribution: str, methods: dict[str, str]) -> Path:
    """Write the metadata of a distribution that brings methods.

    Args:
        folder: where they go; returned.
        distribution: its name.
        methods: name of the method -> "module:object" of its entry point.
    """
    about = folder / f"{distribution.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n", encoding="utf-8"
    )
    points = "".join(f"{name} = {target}\n" for name, target in methods.items())
    (about / "entry_points.txt").write_text(f"[medflare.methods]\n{points}", encoding="utf-8")
    return folder
