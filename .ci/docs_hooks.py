"""What the site is made of besides the pages in this folder: README, CONTRIBUTING and CHANGELOG of the repository, a page of tables for
every committed study, the settings of a task and the hyper-parameters of all methods from the code, and a page of API
reference for every room of the package. Called by mkdocs (mkdocs.yml)."""

import inspect
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "custom" / "medflare"
FROM_THE_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SETTINGS = "<!-- generated from TaskConfig by: python .ci/docs_hooks.py -->"
STUDY = re.compile(r"\]\(results/(\w+)/study\.zip\)")
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for source, page in FROM_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for study in sorted((ROOT / "docs" / "results").glob("*/study.zip")):
        files.append(File.generated(config, f"results/{study.parent.name}.md", content=tables(study)))
    files.append(File.generated(config, "methods/hyper_parameters.md", content=hyper_parameters()))
    for room in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        files.append(File.generated(config, f"api/{room.name}.md", content=reference(room)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that lead to files of the repository, as a forge shows them, lead to the site's pages."""
    markdown = STUDY.sub(r"](results/\1.md)", markdown)
    source = next((name for name, target in FROM_THE_ROOT.items() if target == page.file.src_uri), f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: relinked(link, source, page.file.src_uri), markdown)


def tables(study: Path) -> str:
    """The page of a study: its command and tables."""
    with zipfile.ZipFile(study) as archive:
        return archive.read("tables.md").decode()


def benchmarks() -> str:
    """The page of measurements, from benchmarks.json."""
    note = "Generated from `benchmarks/results.json`. Ratios were measured in one run; compare only numbers of one table."
    page = ["# Benchmarks", "", note, ""]
    for measured in json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8")):
        page += [f"## {measured['title']}", "", f"`{measured['command']}`", ""]
        page += [f"Commit {measured['commit']}, {measured['date']}, {measured['machine']}. {measured['note']}", ""]
        page += [f"| {' | '.join(row)} |" for row in (measured["columns"], ["---"] * len(measured["columns"]), *measured["rows"])] + [""]
    return "\n".join(page)


def task_settings() -> str:
    """The page on tasks, ending with every setting, its type, range, default and meaning, from `TaskConfig`."""
    from pydantic import TypeAdapter

    from medflare.tasks.config import TaskConfig

    schema = TypeAdapter(TaskConfig).json_schema()
    described = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(TaskConfig) or "", re.MULTILINE)
    meaning = {name: " ".join(text.split()).replace("|", "\\|") for name, text in described}
    rows = ["| setting | type and range | default | meaning |", "|---|---|---|---|"]
    for name, setting in schema["properties"].items():
        default = "required" if name in schema["required"] else f"`{json.dumps(setting['default'])}`" if "default" in setting else "none"
        rows.append(f"| `{name}` | {json_type(setting)} | {default} | {meaning[name]} |")
    page = (ROOT / "docs" / "task.md").read_text(encoding="utf-8")
    return page.split(SETTINGS)[0] + SETTINGS + "\n\n" + "\n".join(rows) + "\n"


def json_type(schema: Mapping[str, Any]) -> str:
    """A JSON schema's type and range in words."""
    if "anyOf" in schema:
        return " or ".join(json_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    limits = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤")) if key in schema]
    items = f" of {json_type(schema['items'])}" if isinstance(schema.get("items"), dict) else ""
    return " ".join([str(schema.get("type", "object")) + items, *limits])


def hyper_parameters() -> str:
    """Every hyper-parameter of every method, as `medflare methods` prints it."""
    from medflare.cli.methods import method_listing
    from medflare.methods.catalogue import get_method, method_names

    listed = [f"## {name}\n\n```text\n{method_listing(get_method(name))}\n```" for name in method_names()]
    return "\n\n".join(["# All hyper-parameters", *listed]) + "\n"


def relinked(link: re.Match[str], source: str, page: str) -> str:
    """The link of a file `source` of the repository, as it stands on a page of the site; the mere text where the site lacks its target."""
    text, target, anchor = link.groups()
    wanted = os.path.normpath(os.path.join(os.path.dirname(source), target))
    if wanted.startswith("docs/") and source.startswith("docs/"):
        return link[0]
    found = FROM_THE_ROOT.get(wanted) or (wanted.removeprefix("docs/") if wanted.startswith("docs/") else None)
    if found is not None:
        return f"[{text}]({os.path.relpath(found, os.path.dirname(page) or '.')}{anchor or ''})"
    if (ROOT / wanted).exists():
        return f"`{wanted}`" if text.strip("`") in wanted else f"{text} (`{wanted}`)"
    return link[0]  # leads nowhere, and mkdocs says so


def reference(room: Path) -> str:
    """The page of a room: its modules with everything public in them."""
    modules = sorted(path for path in room.rglob("*.py") if path.stem != "__main__" and path.read_text(encoding="utf-8").strip())
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in modules]
    return "\n\n".join([f"# {room.name}", *(f"::: {name}" for name in names)]) + "\n"


WRITTEN = {"benchmarks.md": benchmarks, "task.md": task_settings}  # generated pages that are committed

if __name__ == "__main__":
    for name, made in WRITTEN.items():
        (ROOT / "docs" / name).write_text(made(), encoding="utf-8")
