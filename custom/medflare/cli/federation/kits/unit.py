"""A systemd unit that runs a party from its kit: from boot, and again when its process is killed."""

import pwd
from collections.abc import Sequence
from typing import Final

from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.starting import environment

_COMMANDS: Final = "/usr/local/bin:/usr/bin:/bin"
_UNIT: Final = """\
[Unit]
Description=medflare, {kind} {name}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User={user}
UMask=0077
WorkingDirectory={folder}
{environment}
# Ends what was started by hand, and clears the numbers of processes that a power cut left behind: after the boot they may be others'.
ExecStartPre={stop}
ExecStart={start}
StandardOutput=append:{output}
StandardError=inherit
Restart=on-failure
RestartSec=30
TimeoutStopSec=30
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""


def unit_name(kit: Kit) -> str:
    """The unit's file name."""
    return f"medflare-{kit.name}.service"


def unit_text(kit: Kit, medflare: Sequence[str]) -> str:
    """The unit. FLARE's shell runs in the foreground: it ends with 0 where FLARE was asked to shut down, and is not started again then.

    Args:
        kit: of a site or the server; its owner is the account that runs it.
        medflare: the words that call the `medflare` command; the first is an absolute path.
    """
    return _UNIT.format(
        kind=kit.kind,
        name=_plain(kit.name),
        user=pwd.getpwuid(kit.folder.stat().st_uid).pw_name,
        folder=_plain(str(kit.folder)),
        environment="\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in environment(_COMMANDS).items()),
        stop=_command(*medflare, "site", "stop", str(kit.folder)),
        start=_command(str(kit.folder / "startup" / "sub_start.sh")),
        output=_plain(str(kit.output)),
    )


def _plain(text: str) -> str:
    """systemd's own variables begin with a per cent sign."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return '"{}"'.format(_plain(text).replace("\\", "\\\\").replace('"', '\\"'))


def _command(*words: str) -> str:
    return " ".join(_quoted(word).replace("$", "$$") for word in words)
