"""`medflare provision`: a federation's startup kits by FLARE, with medflare's policies."""

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from medflare.cli import root_key
from medflare.cli.options import PathArgument
from medflare.cli.startup_kit import KitSettings, make_private, open_kit, set_up
from medflare.core.errors import ConfigError, one_line

_PARTIES = ("server", "admin", "simulator_server")  # names that FLARE gives to parties
# The same federation as poc_workspace/project.yml.
_EXAMPLE = """\
# A federation: one server, four hospitals, four people, mutual TLS. Set the names of the server, sites, organizations and people.
api_version: 3
name: medflare
description: personal and domain-general models for medical imaging across hospitals
participants:
  # The server's name is its full host name, which every hospital resolves (localhost: all on one machine).
  # The port must be reachable from the hospitals, TCP.
  - {name: localhost, type: server, org: coordination, fed_learn_port: 8002, connection_security: mtls}
  # A site's name is public in the federation.
  - {name: site-1, type: client, org: hospital_one}
  - {name: site-2, type: client, org: hospital_two}
  - {name: site-3, type: client, org: hospital_three}
  - {name: site-4, type: client, org: hospital_four}
  # project_admin: runs the federation; org_admin: runs the hospital's site; lead: submits jobs; member: lists jobs.
  - {name: admin@coordination.org, type: admin, org: coordination, role: project_admin}
  - {name: it@hospital-one.org, type: admin, org: hospital_one, role: org_admin}
  - {name: lead@coordination.org, type: admin, org: coordination, role: lead}
  - {name: member@hospital-two.org, type: admin, org: hospital_two, role: member}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {template_file: [master_template.yml]}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {config_folder: config}
  - path: nvflare.lighter.impl.cert.CertBuilder
    args: {root_valid_days: 1825}
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""  # noqa: E501


def provision(
    project: PathArgument,
    workspace: Path = Path("federation"),
    add_client: Path | None = None,
    add_user: Path | None = None,
    leave_root_key: bool = False,
    new: bool = False,
) -> None:
    """Write a startup kit for each party of a federation, with medflare's policies.

    The project admin runs it: the root key and all private keys are made here. It locks the root
    key with a passphrase (MEDFLARE_ROOT_PASSPHRASE, else it asks).

    Args:
        project (PROJECT): FLARE's project file: server, sites and people
        workspace: Folder for the startup kits and the root key
        add_client: YAML file of a site to add: name, type, org
        add_user: YAML file of a person to add: name, type, org, role
        leave_root_key: No passphrase: for trials on one machine
        new: Only write an example of the file PROJECT

    Examples:
        medflare provision project.yml --new                        # write an example project
            file, and edit it
        medflare provision project.yml --workspace federation       # then: medflare site setup KIT
        medflare provision project.yml --add-client site-5.yml      # a kit for one more site
    """
    if new:
        _write_example(project)
        return
    name = _project_name(project, add_client)
    state = workspace / name / "state"
    _check_root_key(state, leave_root_key)
    passphrase = "" if leave_root_key else _passphrase()
    command = [sys.executable, "-m", "nvflare.cli", "provision"]
    command += ["-p", str(project), "-w", str(workspace), "--force"]
    if add_client is not None:
        command += ["--add-client", str(add_client)]
    if add_user is not None:
        command += ["--add-user", str(add_user)]
    with _root_key_opened(state, passphrase):
        ended = subprocess.run(command, umask=0o077, check=False)
    if ended.returncode:
        raise ConfigError(
            f"{project}: nvflare provision failed with status {ended.returncode}; "
            "see its message above"
        )
    kits = _set_up_newest(workspace / name)
    print(f"startup kits: {kits}")
    if kits.name != "prod_00":
        print(
            "Send only the kits of new parties and delete the others: "
            "kits of earlier generations stay in use."
        )
    print(
        "next: medflare site doctor KIT    (not nvflare preflight-check, "
        "which disturbs a party that runs)"
    )


@contextmanager
def _root_key_opened(state: Path, passphrase: str) -> Iterator[None]:
    """Unlock the root key, and lock it at the end, also after an interrupt."""
    if passphrase and (state / root_key.LOCKED).exists():
        root_key.unlock(state, passphrase)
    try:
        yield
    finally:
        if passphrase and (state / root_key.OPEN).exists():
            root_key.lock(state, passphrase)


def _write_example(project: Path) -> None:
    if project.exists():
        raise ConfigError(f"{project} exists; give --new another name")
    project.write_text(_EXAMPLE, encoding="utf-8")
    print(f"written: {project}\nnext: set the names in it, then: medflare provision {project}")


def _project_name(project: Path, added: Path | None) -> str:
    """The federation's name, which is that of its folder in the workspace.

    `added`: file of a further site. ConfigError for a name that is no folder's, for relays, and for
    sites that FLARE would take for another party.
    """
    import yaml

    from medflare.core.settings import check_site_name

    if not project.is_file():
        raise ConfigError(
            f"{project}: no such file; correct the path, or write an example with: "
            f"medflare provision {project} --new"
        )
    if added is not None and not added.is_file():
        raise ConfigError(f"{added}: no such file; correct the path")
    try:
        content = yaml.safe_load(project.read_text(encoding="utf-8"))
        name = str(content["name"])
        participants = content["participants"]
        if added is not None:
            site = yaml.safe_load(added.read_text(encoding="utf-8"))
            participants.append({"type": "client", **site})
        kinds = {party["type"] for party in participants}
        sites = [str(party["name"]) for party in participants if party["type"] == "client"]
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{added or project}: not a project file of FLARE ({one_line(error)}); correct it"
        ) from error
    if PurePath(name).name != name or name == "..":
        raise ConfigError(f"{project}: name {name!r} is no name of a folder; take another")
    if "relay" in kinds:
        raise ConfigError(
            f"{added or project}: through a relay of FLARE a site can give orders to the others; "
            "take it out and connect the sites to the server"
        )
    taken = set(_PARTIES)
    for site in sites:
        check_site_name(site)
        if site.casefold() in taken:
            raise ConfigError(f"{project}: site {site!r}: another party is called so; rename it")
        taken.add(site.casefold())
    return name


def _check_root_key(state: Path, leave_root_key: bool) -> None:
    """Raise ConfigError where FLARE would make another root: its kits cannot join those in use."""
    locked = (state / root_key.LOCKED).exists()
    has_kits = any(state.parent.glob("prod_*"))
    if has_kits and not locked and not (state / root_key.OPEN).exists():
        raise ConfigError(
            f"{state.parent} has startup kits and no root key; "
            f"put {root_key.LOCKED} back into {state}"
        )
    if locked and leave_root_key:
        raise ConfigError(f"the root key in {state} is locked; leave out --leave-root-key")


def _passphrase() -> str:
    passphrase = os.environ.get(root_key.PASSPHRASE_VARIABLE, "")
    if not passphrase:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"no passphrase for the root key; set {root_key.PASSPHRASE_VARIABLE} "
                f"({root_key.SHORTEST} characters or more)"
            )
        passphrase = getpass.getpass(
            f"passphrase of the root key ({root_key.SHORTEST} characters or more): "
        )
        if passphrase != getpass.getpass("once more: "):
            raise ConfigError("these are two passphrases; start again")
    root_key.check_passphrase(passphrase)
    return passphrase


def _set_up_newest(federation: Path) -> Path:
    """Write medflare's policies into the kits that were just made; their folder."""
    # By name, prod_100 comes before prod_99.
    newest = max(federation.glob("prod_*"), key=lambda path: path.stat().st_mtime)
    for kit in sorted(newest.iterdir()):
        files = ("fed_server.json", "fed_client.json")  # people have none of them
        if any((kit / "startup" / name).is_file() for name in files):
            set_up(open_kit(kit), KitSettings())
    make_private(newest)  # FLARE lets all accounts read its scripts, also those of people
    return newest
