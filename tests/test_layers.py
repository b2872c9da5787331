"""The house rules that a machine can check: imports go down the layers and never in a circle, nothing is unpickled or globally seeded."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "custom" / "medflare"

# From the top down; names that share a line may not import one another.
LAYERS = (
    ("cli",),
    ("studies", "flare"),
    ("federation",),
    ("methods", "evaluation"),
    ("inference", "privacy"),
    ("adaptation",),
    ("training",),
    ("data",),
    ("networks",),
    ("tasks",),
    ("core",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
GLOBAL_SEED = re.compile(r"(torch|numpy|np|random|monai)(\.\w+)*\.(manual_seed|manual_seed_all|seed|seed_all|set_determinism)")
IN_TEXT = re.compile(r"(medflare(?:\.\w+)+)(?::(\w+))?")

# Finds its methods by looking into its folder, so it depends on every file there that holds one.
CATALOGUE = "medflare.methods.catalogue"
HOLDS_A_METHOD = re.compile(r"^METHOD\b.*=", re.MULTILINE)


def module_name(path: Path) -> str:
    """`medflare.core.rng` of custom/medflare/core/rng.py; a folder's name of its `__init__.py`."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FACADES = {name for name, path in MODULES.items() if path.stem == "__init__"}
FOLDERS = sorted({path.parent for path in MODULES.values()})


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def layer_of(path: Path) -> str:
    """The top-level part of the package that a file belongs to; "" for the package itself."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


# ---- what a file imports -------------------------------------------------------------------------------------------------


class Import(NamedTuple):
    name: str  # with what is taken from the module, as far as it is known: "medflare.core.rng.seeded"
    line: int
    by: str  # "statement", or "text": a string that names a module, which something imports later

    def target(self, modules: Mapping[str, object]) -> str:
        """The module of ours that is imported; "" for everything else."""
        name = self.name
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name


def imports(tree: ast.Module, modules: Mapping[str, object]) -> Iterator[Import]:
    """Everything imported anywhere in a file: inside functions, for type checkers and by texts as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, "statement") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from (Import(f"{origin}.{alias.name}", node.lineno, "statement") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := IN_TEXT.fullmatch(node.value)):
            module, attribute = match.groups()
            if attribute or module in modules or module.rpartition(".")[0] in set(modules) - FACADES:
                yield Import(f"{module}.{attribute}" if attribute else module, node.lineno, "text")


def used_of_the_package(tree: ast.Module) -> set[str]:
    """`x` of every `medflare.x` that the file evaluates."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "medflare"}


# ---- rules for one file --------------------------------------------------------------------------------------------------


def violations(path: Path, source: str) -> list[str]:
    """Everything in one file of the package that breaks a rule, one line each."""
    tree, layer = ast.parse(source), layer_of(path)
    found = _calls(tree, path)
    for item in imports(tree, MODULES):
        first = item.name.split(".")[0]
        if not first:
            found.append(f"line {item.line}: relative import")
        if first == "nvflare" and layer != "flare":
            found.append(f"line {item.line}: imports {item.name}: only flare/ knows NVIDIA FLARE")
        if first in ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"):
            found.append(f"line {item.line}: imports {item.name}: nothing is ever pickled")
        if first == "torchvision":
            found.append(f"line {item.line}: imports torchvision: networks come from MONAI or are written small")
        if first == "medflare":
            found += [f"line {item.line}: imports {item.name}: {reason}" for reason in (_upward(layer, item), _facade(item)) if reason]
    if others := used_of_the_package(tree) - {"__version__", "__file__", *RANK}:
        found.append(f"uses {', '.join(sorted(others))} of medflare: import the module that defines it")
    return found


def _calls(tree: ast.Module, path: Path) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        weights_only = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        if name == "torch.load" and not weights_only:
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        if GLOBAL_SEED.fullmatch(name) and path != PACKAGE / "core" / "rng.py":
            found.append(f"line {node.lineno}: {name} seeds a global generator; use medflare.core.rng")
    return found


def _upward(layer: str, item: Import) -> str:
    target = item.name.split(".")[1] if "." in item.name else ""
    if not layer or target in ("", "__version__"):
        return ""
    if target not in RANK:
        return "it is in no known layer"
    return f"{layer} is not above {target}" if target != layer and RANK[target] <= RANK[layer] else ""


def _facade(item: Import) -> str:
    """A folder's `__init__` speaks to users of the package. Inside, whoever imports from it would depend on everything that it shows."""
    if item.name in ("medflare", "medflare.__version__") or item.target(MODULES) not in FACADES:
        return ""
    if item.by == "text":  # a bare folder says where data files or entry points are
        return "" if item.name in FACADES or item.name.endswith(".METHOD") else "a facade is named for its METHOD only"
    return "it comes from a facade; import the module that defines it"


@pytest.mark.parametrize("path", MODULES.values(), ids=named)
def test_module_keeps_the_rules(path: Path) -> None:
    assert layer_of(path) in {"", *RANK}, "a new top-level module needs a place in the layers (docs/architecture.md)"
    assert violations(path, read(path)) == []


# ---- circles -------------------------------------------------------------------------------------------------------------

Graph = dict[str, set[str]]


def import_graph(sources: Mapping[str, str]) -> Graph:
    """Module -> modules it imports. A folder above a file is imported before it and is no dependency of it."""
    graph: Graph = {}
    for name, source in sources.items():
        targets = {item.target(sources) for item in imports(ast.parse(source), sources)} - {"", "medflare"}
        if name == CATALOGUE:
            targets |= {other for other, text in sources.items() if other.startswith("medflare.methods.") and HOLDS_A_METHOD.search(text)}
        graph[name] = {target for target in targets if target != name and not name.startswith(f"{target}.")}
    return graph


def circles(graph: Graph) -> list[str]:
    """Circles, each written as a way through it; enough of them that without one step of each none are left."""
    graph, found = {name: set(targets) for name, targets in graph.items()}, []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            way = list(reversed(error.args[1]))
            found.append(" -> ".join(way))
            graph[way[0]].discard(way[1])
        else:
            return found


def within(folder: str, graph: Graph) -> Graph:
    """The graph of what lies directly in a folder: files, and folders as one."""

    def part(name: str) -> str:
        return name.removeprefix(f"{folder}.").split(".")[0] if name.startswith(f"{folder}.") else ""

    rooms: Graph = {}
    for name, targets in graph.items():
        if part(name):
            rooms.setdefault(part(name), set()).update({part(target) for target in targets} - {"", part(name)})
    return rooms


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph({name: read(path) for name, path in MODULES.items()})


def test_no_files_import_one_another_in_a_circle(graph: Graph) -> None:
    assert circles(graph) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_no_rooms_import_one_another_in_a_circle(folder: Path, graph: Graph) -> None:
    assert circles(within(module_name(folder), graph)) == []


# ---- the drawing ----------------------------------------------------------------------------------------------------------


def drawn_layers(page: str) -> list[tuple[str, ...]]:
    """The layers of the block under "## Rooms": lines like `    studies/ | flare/   what they do`, top first."""
    block = page[page.index("## Rooms") :].split("\n## ")[0]
    heads = re.findall(r"^    (\w+/(?: \| \w+/)*)", block, flags=re.MULTILINE)
    return [tuple(re.findall(r"\w+", head)) for head in heads]


def test_the_layers_are_those_of_the_architecture_note() -> None:
    assert drawn_layers(read(ROOT / "docs" / "architecture.md")) == list(LAYERS)


# ---- the rules catch what they are for ------------------------------------------------------------------------------------

BAD = {
    "import nvflare": ("methods/x.py", "only flare/"),
    "def f():\n    from nvflare.apis import dxo": ("evaluation/x.py", "only flare/"),
    "from medflare.flare.messages import to_dxo": ("federation/x.py", "federation is not above flare"),
    "from medflare.studies.grid import run_study": ("flare/x.py", "flare is not above studies"),
    "from medflare.evaluation.results import RunResults": ("methods/x.py", "methods is not above evaluation"),
    "from medflare import studies": ("federation/x.py", "federation is not above studies"),
    "import medflare.methods.fedsm.algorithms": ("inference/x.py", "inference is not above methods"),
    "def f():\n    from medflare.data import splits": ("networks/x.py", "networks is not above data"),
    "BUILDER = 'medflare.flare.guard:OutboundGuard'": ("methods/x.py", "methods is not above flare"),
    "TARGET = 'medflare.networks.catalogue.build_network'": ("tasks/x.py", "tasks is not above networks"),
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from medflare.tasks import config": ("core/x.py", "core is not above tasks"),
    "from medflare.helpers import x": ("cli/x.py", "no known layer"),
    "from medflare.methods.prr import METHOD": ("cli/x.py", "from a facade"),
    "from medflare.methods import SiteAlgorithm": ("methods/x.py", "from a facade"),
    "import medflare.methods": ("cli/x.py", "from a facade"),
    "from medflare import methods": ("cli/x.py", "from a facade"),
    "HALF = 'medflare.methods.prr:PRRSite'": ("cli/x.py", "for its METHOD only"),
    "from medflare import run_local": ("cli/x.py", "from a facade"),
    "import medflare\nmedflare.run_local()": ("cli/x.py", "uses run_local"),
    "from . import rng": ("core/x.py", "relative import"),
    "from .rng import seeded": ("core/x.py", "relative import"),
    "import pickle": ("core/x.py", "pickled"),
    "import torch\ntorch.load('x')": ("core/x.py", "weights_only"),
    "import torch\ntorch.load('x', weights_only=False)": ("core/x.py", "weights_only"),
    "import torch\ntorch.manual_seed(0)": ("tasks/x.py", "global generator"),
    "import numpy as np\nnp.random.seed(0)": ("tasks/x.py", "global generator"),
    "import torch\ntorch.cuda.manual_seed_all(0)": ("tasks/x.py", "global generator"),
    "import monai\nmonai.utils.set_determinism(0)": ("tasks/x.py", "global generator"),
    "import torchvision": ("tasks/x.py", "torchvision"),
}
GOOD = {
    "from nvflare.apis import dxo": "flare/x.py",
    "from medflare.core.rng import seeded": "tasks/x.py",
    "from medflare.core import rng": "tasks/x.py",
    "from medflare.methods.base import Step": "methods/x.py",
    "METHOD = 'medflare.methods.prr:METHOD'": "cli/x.py",
    "from importlib import resources\nresources.files('medflare.tasks')": "tasks/x.py",
    "TOPIC = 'medflare.alive'": "core/x.py",
    "from medflare import __version__": "core/x.py",
    "import medflare\nprint(medflare.__version__)": "core/x.py",
    "import torch\ntorch.load('x', weights_only=True)": "core/x.py",
    "import torch\ntorch.manual_seed(0)": "core/rng.py",
    "import torch\ntorch.Generator().manual_seed(0)": "tasks/x.py",
    "from medflare.federation.local.loop import run_local": "__init__.py",
}


@pytest.mark.parametrize("source", BAD)
def test_rules_catch(source: str) -> None:
    path, expected = BAD[source]
    assert any(expected in line for line in violations(PACKAGE / path, source))


@pytest.mark.parametrize("source", GOOD)
def test_rules_allow(source: str) -> None:
    assert violations(PACKAGE / GOOD[source], source) == []


BACK = {
    "statement": "from medflare.core.a import x",
    "module": "from medflare.core import a",
    "lazy": "def f():\n    from medflare.core.a import x",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import medflare.core.a",
    "text": "A = 'medflare.core.a:x'",
    "text without a colon": "A = 'medflare.core.a'",
}


@pytest.mark.parametrize("back", BACK)
def test_circles_of_files_are_caught(back: str) -> None:
    sources = {"medflare": "", "medflare.core": "", "medflare.core.a": "from medflare.core.b import y"}
    assert circles(import_graph({**sources, "medflare.core.b": BACK[back]}))
    assert circles(import_graph({**sources, "medflare.core.b": "", "medflare.core.c": BACK[back]})) == []


def test_circles_through_the_catalogue_are_caught() -> None:
    method = "METHOD: Method = Method(site='medflare.methods.x.algorithms:Site')"
    sources = {CATALOGUE: "", "medflare.methods": "", "medflare.methods.x": method, "medflare.methods.x.algorithms": ""}
    assert circles(import_graph(sources)) == []
    assert circles(import_graph({**sources, "medflare.methods.x.algorithms": f"from {CATALOGUE} import get_method"}))


def test_circles_of_rooms_are_caught() -> None:
    across = {"medflare.flare.a.one": "import medflare.flare.b.one", "medflare.flare.b.two": "from medflare.flare.a import two"}
    files = {"medflare.flare.a.two": "", "medflare.flare.b.one": "", **across}
    assert circles(import_graph(files)) == []
    assert circles(within("medflare.flare", import_graph(files)))
    assert circles(within("medflare.flare.a", import_graph(files))) == []
    assert circles(within("medflare.flare", import_graph({**files, "medflare.flare.b.two": ""}))) == []


def test_the_drawing_is_read() -> None:
    block = "    cli/            studies/ are below\n    studies/ | flare/\n                    more\n"
    assert drawn_layers(f"# A\n\n## Rooms\n\nText.\n\n{block}\n## Next\n\n    no/\n") == [("cli",), ("studies", "flare")]
