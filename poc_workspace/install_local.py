"""Puts medflare's policies and settings into the local/ folder of a startup kit. Each party runs it on its own kit.

    python install_local.py KIT [--data-root FOLDER] [--device cuda:0] [--cache FOLDER]      at a hospital
    python install_local.py KIT --storage FOLDER                                             at the server

What FLARE provisioned stays beside it as *.json.default. Files that are there already are kept unless --force is given.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).resolve().parent / "local"


def main() -> None:
    options = _parser().parse_args()
    kit, local = options.kit.resolve(), options.kit.resolve() / "local"
    kind = _kind(kit)
    if kind is None:
        sys.exit(f"{kit} is no startup kit of a server or a site: startup/fed_server.json or startup/fed_client.json is missing")
    for template in sorted((TEMPLATES / kind).glob("*.json")):
        target = local / template.name
        if target.exists() and not options.force:
            print(f"kept      {target}")
            continue
        shutil.copyfile(template, target)
        print(f"installed {target}")
    if kind == "server":
        _edit(local / "resources.json", lambda resources: _set_storage(resources, (options.storage or kit / "storage").resolve()))
    else:
        own = {"data_root": options.data_root, "device": options.device, "cache": options.cache}
        _edit(local / "medflare.json", lambda settings: _set_own(settings, own))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Install medflare's policies and settings in a startup kit.")
    parser.add_argument("kit", type=Path, help="the startup kit, a folder with startup/ and local/")
    parser.add_argument("--data-root", type=Path, help="site: folder with datalist.json; without it only tasks with embedded images run")
    parser.add_argument("--device", default="cpu", help="site: where models run: cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="site: folder for decoded images (default: the job's own folder)")
    parser.add_argument("--storage", type=Path, help="server: folder for submitted jobs and results (default: KIT/storage)")
    parser.add_argument("--force", action="store_true", help="replace files that are there already")
    return parser


def _kind(kit: Path) -> str | None:
    found = [kind for kind, file in (("server", "fed_server.json"), ("site", "fed_client.json")) if (kit / "startup" / file).is_file()]
    return found[0] if found else None


def _edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _set_storage(resources: dict[str, Any], folder: Path) -> None:
    """FLARE's default is a folder below /tmp that all federations of a machine share and a reboot empties."""
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(folder / "snapshots")
    manager = next(component for component in resources["components"] if component["id"] == "job_manager")
    manager["args"]["uri_root"] = str(folder / "jobs")


def _set_own(settings: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        settings.pop(name, None)
        if value is not None:
            settings[name] = str(value)


if __name__ == "__main__":
    main()
