"""Puts medflare's policies and settings into the local/ folder of a startup kit. Each party runs it on its own kit.

    python install_local.py KIT [--data-root FOLDER] [--device cuda:0] [--batch-size 4] [--cache FOLDER]      at a hospital
    python install_local.py KIT --storage FOLDER                                                              at the server
    python install_local.py KIT --bring-code ...               at either, where medflare itself is not installed

What FLARE provisioned stays beside it as *.json.default; resources.json is made from it, so that a kit prepared for Docker or
Kubernetes keeps its launcher. Files that are there already are kept unless --force is given.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).resolve().parent / "local"
_PLAIN_LAUNCHER = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
_SHARED = "/tmp/nvflare/"  # FLARE's default: all federations of a machine share it, and a reboot empties it


def main() -> None:
    options = _parser().parse_args()
    kit, local = options.kit.resolve(), options.kit.resolve() / "local"
    kind = _kind(kit)
    if kind is None:
        sys.exit(f"{kit} is no startup kit of a server or a site: startup/fed_server.json or startup/fed_client.json is missing")
    storage = (options.storage or kit / "storage").resolve()
    own = {"data_root": options.data_root, "device": options.device, "cache": options.cache, "batch_size": options.batch_size}
    for template in sorted((TEMPLATES / kind).glob("*.json")):
        target = local / template.name
        if target.exists() and not options.force:
            print(f"kept      {target}")
            continue
        if template.name == "privacy.json" and options.bring_code:
            target.unlink(missing_ok=True)  # it names the guard, which is medflare's
            continue
        source = local / "resources.json.default" if template.name == "resources.json" else template
        content = json.loads(source.read_text(encoding="utf-8"))
        if template.name == "resources.json":
            adapt(content, storage, installed=not options.bring_code)
        elif template.name == "authorization.json" and options.bring_code:
            content["permissions"]["lead"]["byoc"] = "any"
        elif template.name == "medflare.json":
            _set_own(content, own)
        target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(f"installed {target}")


def adapt(resources: dict[str, Any], storage: Path, installed: bool) -> None:
    """What medflare needs of FLARE's resources.json, in place.

    Args:
        storage: where a server keeps jobs and results.
        installed: whether medflare is; otherwise nothing of it is named.
    """
    components = {component["id"]: component for component in resources["components"]}
    if installed:
        resources["class_allow_list"].insert(0, "medflare.")
        launcher = components.get("process_launcher", {})
        if launcher.get("path") == _PLAIN_LAUNCHER:
            launcher["path"] = "medflare.flare.launcher.RestartingLauncher"
    for server in resources.get("servers", ()):
        server["heart_beat_timeout"] = 120  # seconds; FLARE's ten minutes are long for those who wait for a site that is gone
    if "job_manager" in components and components["job_manager"]["args"]["uri_root"].startswith(_SHARED):
        components["job_manager"]["args"]["uri_root"] = str(storage / "jobs")
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Install medflare's policies and settings in a startup kit.")
    parser.add_argument("kit", type=Path, help="the startup kit, a folder with startup/ and local/")
    parser.add_argument("--data-root", type=Path, help="site: folder with datalist.json; without it only tasks with embedded images run")
    parser.add_argument("--device", default="cpu", help="site: where models run: cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, help="site: most images at once, for a small GPU (default: as the task says)")
    parser.add_argument("--cache", type=Path, help="site: folder for decoded images (default: medflare-cache beside local/)")
    parser.add_argument("--storage", type=Path, help="server: folder for submitted jobs and results (default: KIT/storage)")
    parser.add_argument(
        "--bring-code",
        action="store_true",
        help="medflare is not installed here: a lead's jobs may bring it (medflare job ... --embed-code); no OutboundGuard, no restarts",
    )
    parser.add_argument("--force", action="store_true", help="replace files that are there already")
    return parser


def _kind(kit: Path) -> str | None:
    found = [kind for kind, file in (("server", "fed_server.json"), ("site", "fed_client.json")) if (kit / "startup" / file).is_file()]
    return found[0] if found else None


def _set_own(settings: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        settings.pop(name, None)
        if value is not None:
            settings[name] = str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
