"""What the site is made of besides the pages in this folder: README, CONTRIBUTING and CHANGELOG of the repository, a page of tables for
every committed study, the settings of a task and the hyper-parameters of all methods from the code, a page of API reference for
every room of the package, the notebook with the outputs of a run, and screenshots of pages that medflare writes. Called by mkdocs
(mkdocs.yml)."""

import inspect
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "custom" / "medflare"
FROM_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
ITEMS = "<!-- generated from the methods' declarations by: python .ci/docs_hooks.py -->"
FAMILIES = "<!-- generated from the catalogue by: python .ci/docs_hooks.py -->"
COST_NOTE = "The number is the processor time of a round beside FedAvg's (`benchmarks/cost.py --methods all --write`)."
SETTINGS = "<!-- generated from TaskConfig by: python .ci/docs_hooks.py -->"
BENCHMARKS_NOTE = """\
Generated from `benchmarks/results.json`. Ratios were measured in one run; compare only numbers of one section. H100, H200: NVIDIA,
torch 2.11.0+cu130, Python 3.12, 16 CPU cores, where `...` is `python benchmarks/gpu.py --device cuda --seconds 44`."""
STUDY = re.compile(r"\]\(results/(\w+)/study\.zip\)")
# The figure that the repository shows.
REPORT = re.compile(r"!\[([^\]]*)\]\((?:docs/)?report\.png\)")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
NOTEBOOK = "tutorial.ipynb"
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for source, page in FROM_THE_ROOT.items():
        files.append(
            File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    for study in sorted((ROOT / "docs" / "results").glob("*/study.zip")):
        files.append(
            File.generated(config, f"results/{study.parent.name}.md", content=tables(study))
        )
    files.append(File.generated(config, "methods/hyper_parameters.md", content=hyper_parameters()))
    files.append(
        File.generated(
            config, "site.css", content=(ROOT / ".ci" / "site.css").read_text(encoding="utf-8")
        )
    )
    body, outputs = notebook()
    files.append(File.generated(config, "notebook.md", content=body))
    for name, content in {**outputs, **screenshots()}.items():
        files.append(File.generated(config, name, content=content))
    for room in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        files.append(File.generated(config, f"api/{room.name}.md", content=reference(room)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that lead to files of the repository, as a forge shows them, lead to the site's pages."""
    markdown = STUDY.sub(r"](results/\1.md)", markdown).replace(f"]({NOTEBOOK})", "](notebook.md)")
    if page.file.src_uri == "index.md" and screenshots():
        markdown = REPORT.sub(gallery(), markdown)
    elif screenshots():
        markdown = REPORT.sub(r"![\1](figures/report.png)", markdown)
    source = next(
        (name for name, target in FROM_THE_ROOT.items() if target == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )
    return LINK.sub(lambda link: relinked(link, source, page.file.src_uri), markdown)


@cache
def notebook() -> tuple[str, dict[str, bytes]]:
    """The tutorial's notebook, run now: its page, and the pictures of its outputs by name."""
    import nbformat
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter

    content = nbformat.read(ROOT / "docs" / NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        kernel = KernelManager(transport="ipc", ip=f"{folder}/kernel")  # no port
        try:
            NotebookClient(content, km=kernel, resources={"metadata": {"path": folder}}).execute()
        finally:
            kernel.shutdown_kernel(now=True)
    body, resources = MarkdownExporter().from_notebook_node(content)
    pictures = {
        f"figures/{name}": data for name, data in resources["outputs"].items() if name in body
    }
    body = re.sub(r"!\[png\]\((\w+\.png)\)", r"![Output of the cell above](figures/\1)", body)
    return re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL), pictures


# Screenshot -> (caption, page below the folder of examples, height of the window)
FIGURES = {
    "figures/report.png": (
        "Report of a run: verdict, result table, learning curves",
        "run/report.html",
        1500,
    ),
    "figures/site.png": (
        "Report that stays at a site: metrics by structure, and patient by patient",
        "run/sites/site-1/report.html",
        1500,
    ),
    "figures/study.png": (
        "Page of a study: ranks, gain over training alone at each site, tables",
        "study.html",
        1500,
    ),
}


@cache
def screenshots() -> dict[str, bytes]:
    """Pictures of the pages of a new run and of a committed study; none without Chromium, and the site then shows docs/report.png."""
    if CHROMIUM is None:
        return {}
    from medflare import run_local
    from medflare.cli.command import main

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_local(
            "fedsm",
            "phantom",
            [f"site-{number}" for number in range(1, 5)],
            rounds=10,
            seed=0,
            out=folder / "run",
        )
        with redirect_stdout(io.StringIO()):
            failed = main(
                [
                    "study",
                    "table",
                    str(ROOT / "docs" / "results" / "fundus_fedsm"),
                    "--html",
                    str(folder / "study.html"),
                ]
            )
        if failed:
            raise RuntimeError("the page of the study was not written")
        return {
            picture: screenshot(folder / page, folder, height)
            for picture, (_, page, height) in FIGURES.items()
        }


def gallery() -> str:
    """The screenshots side by side, each a link to itself in full size, for the home page."""
    shown = (
        f'<figure><a href="{name}"><img src="{name}" alt="{caption}"></a><figcaption>{caption}</figcaption></figure>'
        for name, (caption, _, _) in FIGURES.items()
    )
    return f'<div class="gallery">{"".join(shown)}</div>'


def screenshot(page: Path, folder: Path, height: int) -> bytes:
    """PNG file of a page in a window of 1200 pixels; `folder` holds Chromium's profile."""
    picture = folder / "screenshot.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size=1200,{height}",
    ]
    command = [
        str(CHROMIUM),
        *options,
        f"--user-data-dir={folder / 'profile'}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture.read_bytes()


def tables(study: Path) -> str:
    """The page of a study: its command and tables."""
    with zipfile.ZipFile(study) as archive:
        return archive.read("tables.md").decode()


def benchmarks() -> str:
    """The page of measurements, from benchmarks/results.json; one without columns has no table."""
    page = ["# Benchmarks", "", BENCHMARKS_NOTE, ""]
    for measured in json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8")):
        about = f"`{measured['command']}`, commit {measured['commit']}, {measured['machine']}."
        page += [f"## {measured['title']}", "", about, measured["note"], ""]
        if measured["columns"]:
            rule = f"|{'---|' * len(measured['columns'])}"
            head, *rows = (
                f"| {' | '.join(row)} |" for row in (measured["columns"], *measured["rows"])
            )
            page += [head, rule, *rows, ""]
    return "\n".join(page)


def task_settings() -> str:
    """The page on tasks, ending with every setting, its default, meaning and range, from `TaskConfig`."""
    from pydantic import TypeAdapter

    from medflare.tasks.config import TaskConfig

    schema = TypeAdapter(TaskConfig).json_schema()
    described = re.findall(
        r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(TaskConfig) or "", re.MULTILINE
    )
    meaning = {name: " ".join(text.split()) for name, text in described}
    required = []
    optional = []
    for name, setting in schema["properties"].items():
        text = re.sub(r",? see `[a-z]+\.[a-z_]+`", "", meaning[name]).removesuffix(".")
        limits = json_limits(setting)
        if limits:
            text += f" ({limits})"
        if name in schema["required"]:
            required.append(f"- `{name}`: {text}")
            continue
        default = ""
        if "default" in setting:
            default = f" (`{json.dumps(setting['default'], separators=(',', ':'))}`)"
        optional.append(f"- `{name}`{default}: {text}")
    page = (ROOT / "docs" / "task.md").read_text(encoding="utf-8")
    rows = "\n".join(["Required:", "", *required, "", "Optional, with the default:", "", *optional])
    return page.split(SETTINGS)[0] + SETTINGS + "\n\n" + rows + "\n"


def families() -> str:
    """The page on families of methods, ending with a list of them, from the catalogue."""
    from medflare.cli.methods import method_row
    from medflare.methods.catalogue import get_method, method_names

    described = {name: method_row(get_method(name)) for name in method_names()}
    of_family: dict[str, list[str]] = {}
    sent: dict[str, list[str]] = {}
    for name, row in described.items():
        if not row["family"]:
            continue  # a method with a page of its own
        of_family.setdefault(row["family"], []).append(f"- `{name}`, {row['cost']}: {row['title']}")
        tensors = row["leaves"] if row["leaves"].startswith("model") else f"{row['leaves']} alone"
        extra = tensors.removeprefix("model").removeprefix(", ")
        if extra:
            sent.setdefault(extra, []).append(name)
    with_dp = [name for name, row in described.items() if row["DP-SGD"] == "yes"]
    inside = [name for name, row in described.items() if row["outside"] == "no"]
    beside = [f"{tensors} ({code_list(names)})" for tensors, names in sent.items()]
    lines = [
        "## All methods",
        "",
        COST_NOTE,
        "",
        f"- DP-SGD is possible with {code_list(with_dp)}; `sha` needs `rho=0`.",
    ]
    lines.append(f"- Sites that do not train get no model of {code_list(inside)}.")
    lines.append(f"- These send other tensors than `model`, or more: {'; '.join(beside)}.")
    for family, listed in of_family.items():
        lines += ["", f"### {family.capitalize()}", "", *listed]
    page = (ROOT / "docs" / "methods" / "families.md").read_text(encoding="utf-8")
    return page.split(FAMILIES)[0] + FAMILIES + "\n\n" + "\n".join(lines) + "\n"


def code_list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# (item, what it is) -> who sends it, on which conditions; both in order, each once.
Sent = dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]]


def governance() -> str:
    """The page on governance, ending with every item of a site's replies, from the declarations of the methods."""
    from medflare.core.specs import MetaSpec, TensorSpec
    from medflare.federation.builtin_messages import BUILTIN_REPLY_META, PERSONAL_MODEL
    from medflare.federation.settings import CROSS_SITE, ENROL, FINALIZE
    from medflare.methods.catalogue import SURVEYS, get_method, method_names

    by_protection: dict[str, Sent] = {}

    def note(spec: TensorSpec | MetaSpec, sender: str, about: str) -> None:
        protected, condition = protection(spec)
        items = by_protection.setdefault(protected, {})
        senders, conditions = items.setdefault((spec.name, about), ({}, {}))
        senders.setdefault(sender)
        conditions.setdefault(condition)

    of_all = {ENROL: "enrollment", FINALIZE: "end", CROSS_SITE: "`cross_site`"}
    for phase_of_all, sender in of_all.items():
        for reported in BUILTIN_REPLY_META[phase_of_all][0]:
            note(reported, sender, "")
    note(PERSONAL_MODEL, "`share_model`", PERSONAL_MODEL.purpose)
    for name in (*method_names(), *SURVEYS):
        for phase in get_method(name).site_class.phases.values():
            for tensors in phase.reply:
                common = tensors.name == "model" and "receive" not in tensors.purpose
                about = tensors.purpose.removeprefix("the site's ")
                if common:
                    about = "trained model, or its shared part"
                note(tensors, f"`{name}`", about)
            for number in phase.meta:
                note(number, f"`{name}`", number.about if name in SURVEYS else "")
    trained = {f"`{name}`" for name in method_names()}
    lines = []
    for protected, items in by_protection.items():
        lines += ["", f"**{protected}**", "", *sent_items(items, trained)]
    page = (ROOT / "docs" / "governance.md").read_text(encoding="utf-8")
    return page.split(ITEMS)[0] + ITEMS + "\n" + "\n".join(lines) + "\n"


def sent_items(items: Sent, trained: set[str]) -> list[str]:
    """A line for each item that says what it is, and one for all numbers; `trained` are the methods that train."""
    lines = []
    numbers = []
    for (item, about), (senders, conditions) in items.items():
        named = ", ".join(senders) if len(senders) <= 10 else "most methods"
        if trained <= set(senders):
            named = "all that train"
        limits = " or ".join(filter(None, conditions))
        words = "; ".join(filter(None, (about, limits)))
        row = f"`{item}` ({named})" + (words and f": {words}")
        if about:
            lines.append(f"- {row}")
        else:
            numbers.append(row)
    return [*lines, f"- {'; '.join(numbers)}"] if numbers else lines


def protection(spec: Any) -> tuple[str, str]:
    """What a site does with an item before it is sent, and a further condition of this item."""
    conditions = {
        "classes": "no counts if a cell has few",
        "reports": "not if a count is of few",
        "n": "not of a split of few",
        "class_counts": "not if a class has few",
    }
    condition = conditions.get(spec.name, "")
    if spec.per_class == "values":
        condition = "not of a class of few"
    if spec.per_class == "counts":
        condition = "not if a class has few"
    if spec.measured:
        split = {"train": "training"}.get(spec.measured, spec.measured)
        return f"Not sent of few {split} patients", condition
    if hasattr(spec, "template"):
        return "Protected by DP-SGD only, if the method has it", condition
    return "Numbers and names", condition


def json_limits(schema: Mapping[str, Any]) -> str:
    """The range of a number, or of the numbers of a list, in a JSON schema."""
    items = schema.get("items")
    if isinstance(items, dict):
        return json_limits(items)
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
    return " ".join(f"{sign} {schema[key]}" for key, sign in signs if key in schema)


def hyper_parameters() -> str:
    """Every hyper-parameter of every method, as `medflare methods` prints it."""
    from medflare.cli.methods import method_listing
    from medflare.methods.catalogue import get_method, method_names

    listed = [
        f"## {name}\n\n```text\n{method_listing(get_method(name))}\n```" for name in method_names()
    ]
    return "\n\n".join(["# All hyper-parameters", *listed]) + "\n"


def relinked(link: re.Match[str], source: str, page: str) -> str:
    """The link of a file `source` of the repository, as it stands on a page of the site; the mere text where the site lacks its target."""
    text, target, anchor = link.groups()
    wanted = os.path.normpath(os.path.join(os.path.dirname(source), target))
    if wanted.startswith("docs/") and source.startswith("docs/"):
        return link[0].replace(f"[{text}]", f"[{text.removesuffix('.md')}]")
    found = FROM_THE_ROOT.get(wanted) or (
        wanted.removeprefix("docs/") if wanted.startswith("docs/") else None
    )
    if found is not None:
        # A page has no suffix on the site.
        text = re.sub(r"^(?:docs/)?([\w/]+?)(?:/index)?\.md$", r"\1", text)
        return f"[{text}]({os.path.relpath(found, os.path.dirname(page) or '.')}{anchor or ''})"
    if (ROOT / wanted).exists():
        return f"`{wanted}`" if text.strip("`") in wanted else f"{text} (`{wanted}`)"
    return link[0]  # leads nowhere, and mkdocs says so


def reference(room: Path) -> str:
    """The page of a room: its modules with everything public in them."""
    modules = sorted(
        path
        for path in room.rglob("*.py")
        if path.stem != "__main__" and path.read_text(encoding="utf-8").strip()
    )
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in modules
    ]
    return "\n\n".join([f"# {room.name}", *(f"::: {name}" for name in names)]) + "\n"


# Generated pages that are committed.
WRITTEN = {
    "benchmarks.md": benchmarks,
    "governance.md": governance,
    "methods/families.md": families,
    "task.md": task_settings,
}

if __name__ == "__main__":
    for name, made in WRITTEN.items():
        (ROOT / "docs" / name).write_text(made(), encoding="utf-8")
