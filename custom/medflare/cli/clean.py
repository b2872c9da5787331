"""`medflare clean`: what runs hold, and what can be deleted without losing results or models."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from medflare.cli.options import PathArguments
from medflare.cli.run import locked
from medflare.core.errors import StateError
from medflare.core.files import file_digest, refuse_links
from medflare.core.text import printable


def clean(folders: PathArguments, yes: bool = False) -> None:
    """Say what runs hold and what can be freed: states, checkpoints, and copies of equal models.
    Deletes with --yes only.

    The models of a run (models/), results.json, the reports and the scores by patient always stay,
    and so does all that medflare resume needs for an interrupted run.

    Args:
        folders (FOLDER...): Folders of runs, or folders that hold them
        yes: Delete

    Examples:
        medflare clean runs                              # says what would be freed, and deletes
            nothing
        medflare clean runs/fedsm-phantom-seed0 --yes
    """
    from medflare.evaluation.presentation import format_bytes, with_number

    total = 0
    for run in runs_in(folders):
        refuse_links(run)
        with locked(run):
            status, parts = freeable(run)
            print(f"{printable(str(run))}: {status}, {format_bytes(size_of(run))}")
            for what, paths in parts.items():
                size = sum(map(size_of, paths))
                total += size
                print(f"  {what}: {format_bytes(size)} in {with_number(len(paths), 'place')}")
                if yes:
                    _delete(paths)
    if yes:
        print(f"{format_bytes(total)} freed")
    else:
        print(f"{format_bytes(total)} would be freed; delete with --yes")


def runs_in(folders: list[Path]) -> Iterator[Path]:
    """The folders of runs at or directly below some folders, each once.

    Raises:
        StateError: a folder without a run.
    """
    from medflare.federation.checkpoint import has_run

    seen = set()
    for folder in folders:
        runs = []
        for path in (folder, *sorted(folder.glob("*"))):
            if path != folder and path.is_symlink():
                continue  # of another place: name it to clean it
            if has_run(path):
                runs.append(path)
        if not runs:
            raise StateError(
                f"{folder}: no run here; name the folder of a run, or the folder that holds runs"
            )
        for run in runs:
            if run.resolve() not in seen:
                seen.add(run.resolve())
                yield run


def freeable(run: Path) -> tuple[str, dict[str, list[Path]]]:
    """The status of a run, and what can be deleted: what it is -> files or folders."""
    from medflare.evaluation.results import COMPLETED, RESULTS_FILE, load_results
    from medflare.federation.checkpoint import checkpoint_of
    from medflare.federation.run import SITES_FOLDER
    from medflare.federation.settings import STATE

    file = run / RESULTS_FILE
    status = load_results(file)["status"] if file.is_file() else "without results"
    checkpoint = checkpoint_of(run)
    parts = {"copies of equal models": list(_copies(run))}
    if status == COMPLETED:
        if checkpoint.is_file():
            parts["checkpoint"] = [checkpoint]
        parts["states of the sites"] = sorted(run.glob(f"{SITES_FOLDER}/*/{STATE}"))
    elif checkpoint.is_file():
        status += ", medflare resume can continue it"
    return status, {what: paths for what, paths in parts.items() if paths}


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; links count nothing."""
    files = [path, *path.rglob("*")]
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def _copies(run: Path) -> Iterator[Path]:
    """The sites' model folders whose weights are also in models/, or in another folder of a site.

    If models are equal, the first one stays, a deployed one if there is any.
    """
    from medflare.federation.run import MODELS_FOLDER, SITES_FOLDER
    from medflare.inference.deployed import CARD_FILE, WEIGHTS_FILE

    digests = {file_digest(file) for file in run.glob(f"{MODELS_FOLDER}/**/{WEIGHTS_FILE}")}
    of_sites = sorted(run.glob(f"{SITES_FOLDER}/*/*/{WEIGHTS_FILE}"))
    of_sites.sort(key=lambda file: file.parent.name != "deployed")
    for file in of_sites:
        digest = file_digest(file)
        names = {path.name for path in file.parent.iterdir()}
        if digest in digests and names <= {WEIGHTS_FILE, CARD_FILE}:
            yield file.parent
        digests.add(digest)
