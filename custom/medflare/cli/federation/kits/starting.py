"""A party started from its kit, and the reason where it does not come up."""

import os
import re
import shlex
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from medflare.cli.federation.kits.certificates import refuse_invalid, server_answer
from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import clear, running, since
from medflare.cli.federation.kits.status import NOT_YET, SIGNS, is_registered
from medflare.core.errors import ConfigError, StateError

_OUTCOME_WAIT: Final = ("NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT", "60")  # for the last word of a site that is gone; FLARE's quarter of an hour
_OWN_ACCOUNT: Final = 0o077  # states, models, predictions and decoded images
_LOOK: Final = 0.5  # seconds between two looks into the log
_LAUNCH: Final = 3.0  # seconds after which FLARE's shell, or the party, is there
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
        ConfigError: its certificate is not valid by this machine's clock, or its folder has a blank in its path.
        StateError: it is not up in time, with the reason as far as its logs tell one.
        KeyboardInterrupt: the wait was interrupted; the party is not.
    """
    log, output = _size(kit.log), _size(kit.output)  # what earlier starts wrote does not count
    found = running(kit)
    if found.first is None:
        _refuse_blanks(kit)
        refuse_invalid(kit)
        clear(kit)
    elif is_registered(kit, found):
        return f"{kit.name} is up already, since {datetime.fromtimestamp(since(found.first)):%F %T} (process {found.first.pid})"
    else:
        print(f"{kit.name} is starting, not {NOT_YET[kit.kind]}", file=sys.stderr, flush=True)
    try:
        if found.first is None:
            _launch(kit)
        if _comes_up(kit, log, patience):
            return f"{kit.name} is up"
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{kit.name}: {_end_it(kit)}") from None
    reason = _reason(_said(kit.log, log)) or _reason(_said(kit.output, output)) or (server_answer(kit) if kit.kind == "site" else "")
    runs = running(kit).first is not None
    outcome = f"is not up after {patience:g} s" if runs else "has ended before it was up"
    about = f"{reason or 'its logs name no error'}; see {kit.log} and {kit.output}{f'; {_end_it(kit)}' if runs else ''}"
    raise StateError(f"{kit.name} {outcome}: {about}")


def environment(path: str) -> dict[str, str]:
    """Variables that a party's processes need: the Python that runs this command comes first, and the wait is shorter.

    Args:
        path: where other commands are looked for.
    """
    name, usual = _OUTCOME_WAIT
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), path]), name: os.environ.get(name, usual)}


def _refuse_blanks(kit: Kit) -> None:
    if any(letter.isspace() for letter in str(kit.folder)):
        raise ConfigError(f"{kit.folder}: FLARE's scripts take no path with blanks; move the kit")


def _comes_up(kit: Kit, log: int, patience: float) -> bool:
    """Wait until the log says that the party is up; False where it does not in time, or where nothing runs any more."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < patience:
        gone = waited > _LAUNCH and running(kit).first is None  # before the log is read: its last words count
        if SIGNS[kit.kind] in _said(kit.log, log):
            return True
        if gone:
            break
        time.sleep(_LOOK)
    return False


def _end_it(kit: Kit) -> str:
    return f"it keeps trying; end it with medflare site stop {shlex.quote(str(kit.folder))}"


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
