"""`medflare clean`: what runs hold, and what can be deleted without losing results or models."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from medflare.cli.options import add_command
from medflare.cli.run import locked
from medflare.core.errors import StateError


@dataclass(frozen=True)
class Part:
    """Files or folders of a run that can be deleted."""

    what: str
    paths: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        return sum(map(size_of, self.paths))

    def delete(self) -> None:
        for path in self.paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def add_commands(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "clean",
        clean,
        "medflare clean runs                              "
        "# says what would be freed, and deletes nothing",
        "medflare clean runs/fedsm-phantom-seed0 --yes",
    )


def clean(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or folders that hold them", metavar="FOLDER..."),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Delete")] = False,
) -> int:
    """Say what runs hold and what can be freed: states, checkpoints, and copies of equal models.
    Deletes with --yes only.

    The models of a run (models/), results.json, the reports and the scores by patient always stay,
    and so does all that medflare resume needs for an interrupted run.
    """
    from medflare.evaluation.presentation import counted, format_bytes

    total = 0
    for run in runs_in(folders):
        with locked(run):
            status, parts = freeable(run)
            print(f"{run}: {status}, {format_bytes(size_of(run))}")
            for part in parts:
                size = part.bytes
                total += size
                places = counted(len(part.paths), "place")
                print(f"  {part.what}: {format_bytes(size)} in {places}")
                if yes:
                    part.delete()
    if yes:
        print(f"{format_bytes(total)} freed")
    else:
        print(f"{format_bytes(total)} would be freed; delete with --yes")
    return 0


def runs_in(folders: list[Path]) -> Iterator[Path]:
    """The folders of runs at or directly below some folders, each once.

    StateError: a folder without a run.
    """
    seen = set()
    for folder in folders:
        candidates = [folder]
        if folder.is_dir():
            candidates += sorted(path for path in folder.iterdir() if path.is_dir())
        runs = [path for path in candidates if _is_run(path)]
        if not runs:
            raise StateError(
                f"{folder}: no run here; name the folder of a run, or the folder that holds runs"
            )
        for run in runs:
            if run.resolve() not in seen:
                seen.add(run.resolve())
                yield run


def freeable(run: Path) -> tuple[str, list[Part]]:
    """The status of a run, and what can be deleted."""
    from medflare.core.store import StateStore
    from medflare.evaluation.results import COMPLETED, RESULTS_FILE, load_results
    from medflare.federation.checkpoint import CHECKPOINT
    from medflare.federation.local.loop import STATE
    from medflare.federation.run import SITES

    file = run / RESULTS_FILE
    status = load_results(file)["status"] if file.is_file() else "without results"
    checkpoint = StateStore(run).path(CHECKPOINT)
    parts = [Part("copies of equal models", tuple(_copies(run)))]
    if status == COMPLETED:
        if checkpoint.is_file():
            parts.append(Part("checkpoint", (checkpoint,)))
        states = sorted(run.glob(f"{SITES}/*/{STATE}"))
        parts.append(Part("states of the sites", tuple(states)))
    elif checkpoint.is_file():
        status += ", medflare resume can continue it"
    return status, [part for part in parts if part.paths]


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count nothing."""
    files = [path, *path.rglob("*")]
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def _is_run(folder: Path) -> bool:
    from medflare.core.store import StateStore
    from medflare.evaluation.results import RESULTS_FILE
    from medflare.federation.checkpoint import CHECKPOINT

    if not folder.is_dir():
        return False
    return (folder / RESULTS_FILE).is_file() or StateStore(folder).path(CHECKPOINT).is_file()


def _copies(run: Path) -> Iterator[Path]:
    """The sites' model folders whose weights are also in models/, or in another folder of a site.

    Of equal models the first one stays, a deployed one if there is any.
    """
    from medflare.core.store import file_digest
    from medflare.federation.run import MODELS, SITES
    from medflare.inference.deployed import CARD_FILE, WEIGHTS_FILE

    digests = {file_digest(file) for file in run.glob(f"{MODELS}/**/{WEIGHTS_FILE}")}
    of_sites = sorted(run.glob(f"{SITES}/*/*/{WEIGHTS_FILE}"))
    of_sites.sort(key=lambda file: file.parent.name != "deployed")
    for file in of_sites:
        digest = file_digest(file)
        names = {path.name for path in file.parent.iterdir()}
        if digest in digests and names <= {WEIGHTS_FILE, CARD_FILE}:
            yield file.parent
        digests.add(digest)
