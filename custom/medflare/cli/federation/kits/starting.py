"""A party started from its kit, and the reason where it does not come up."""

import os
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from medflare.cli.federation.kits.certificates import refuse_invalid, server_answer
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import clear, running, since
from medflare.core.errors import StateError

SIGNS: Final = {"server": "Server started", "site": "Successfully registered client"}  # in FLARE's log: the party is up
_OUTCOME_WAIT: Final = ("NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT", "60")  # for the last word of a site that is gone; FLARE's quarter of an hour
_OWN_ACCOUNT: Final = 0o077  # states, models, predictions and decoded images
_LOOK: Final = 0.5  # seconds between two looks into the log
_LONGEST: Final = 300  # characters of a reason
# What FLARE gives up with; the first that matches is the reason. Lines of Python's tracebacks end with the error's own.
_REASONS: Final = (
    r" - (?:ERROR|CRITICAL) - (?:\[.*?\] - )?(?P<what>.+)",
    r"^(?P<what>[\w.]*(?:Error|Exception|Exit): .+)",
    r"^(?P<what>There seems .+)",
)


def start(kit: Kit, patience: float = 60.0) -> str:
    """Start a party, and wait until its log says that it is up.

    Args:
        kit: of a site or the server.
        patience: seconds.

    Returns:
        One line: that it is up, or that it was already.

    Raises:
        ConfigError: its certificate is not valid by this machine's clock.
        StateError: it is not up in time, with the reason as far as its logs tell one.
    """
    if (first := running(kit).first) is not None:
        return f"{kit.name} is up already, since {datetime.fromtimestamp(since(first)):%F %T} (process {first.pid})"
    refuse_invalid(kit)
    clear(kit)
    log, output = _size(kit.log), _size(kit.output)  # what earlier starts wrote does not count
    _launch(kit)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if SIGNS[kit.kind] in _said(kit.log, log):
            return f"{kit.name} is up"
        time.sleep(_LOOK)
    reason = _reason(_said(kit.log, log)) or _reason(_said(kit.output, output)) or (server_answer(kit) if kit.kind == "site" else "")
    raise StateError(f"{kit.name} is not up after {patience:g} s: {reason or 'its logs name no error'}; see {kit.log} and {kit.output}")


def environment(path: str) -> dict[str, str]:
    """Variables that a party's processes need: the Python that runs this command comes first, and the wait is shorter.

    Args:
        path: where other commands are looked for.
    """
    name, usual = _OUTCOME_WAIT
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), path]), name: os.environ.get(name, usual)}


def _launch(kit: Kit) -> None:
    with open(kit.output, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:  # core.store's brings torch along
        subprocess.run(
            [kit.folder / "startup" / "start.sh"],
            env={**os.environ, **environment(os.environ.get("PATH", os.defpath))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C here, or the end of the terminal, is none of the party's
            umask=_OWN_ACCOUNT,
            check=False,
        )


def _reason(text: str) -> str:
    """The last line that names an error."""
    for pattern in _REASONS:
        if found := [match["what"].strip() for match in re.finditer(pattern, text, re.MULTILINE)]:
            return found[-1][:_LONGEST]
    return ""


def _said(path: Path, start: int) -> str:
    """What was written to a log since it had so many bytes; all of it where it is a new one since."""
    if not path.exists():
        return ""
    content = path.read_bytes()
    return content[start if len(content) >= start else 0 :].decode(errors="replace")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
