"""The house rules that a machine can check: imports only go down the layers, files stay short, nothing is unpickled or globally seeded."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "custom" / "medflare"

# From the top down; names that share a line may not import one another.
LAYERS = (
    ("cli",),
    ("studies", "delivery"),
    ("local", "flare"),
    ("evaluation",),
    ("methods",),
    ("inference",),
    ("tasks",),
    ("core",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
LONGEST_FILE = 400
GLOBAL_SEED = re.compile(r"(torch|numpy|np|random|monai)(\.\w+)*\.(manual_seed|manual_seed_all|seed|seed_all|set_determinism)")

MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON = [path for folder in ("custom", "tests", "benchmarks", "jobs", "poc_workspace") for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    """The top-level part of the package that a file belongs to; "" for the package itself."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of everything imported anywhere in the file, also inside functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, node) of every call of a plain name or attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def violations(path: Path, source: str) -> list[str]:
    """Everything in one file of the package that breaks a rule, one line each."""
    tree, layer, found = ast.parse(source), layer_of(path), []
    for name in imported(tree):
        parts = name.split(".")
        if parts[0] == "nvflare" and layer != "flare":
            found.append(f"imports {name}: only flare/ knows NVIDIA FLARE")
        if parts[0] in ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"):
            found.append(f"imports {name}: nothing is ever pickled")
        if parts[0] == "torchvision":
            found.append("imports torchvision: networks come from MONAI or are written small")
        if parts[0] == "medflare" and len(parts) > 1 and layer:
            found += _upward(layer, parts[1], name)
    for name, call in calls(tree):
        weights_only = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
        if name == "torch.load" and not weights_only:
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
        if GLOBAL_SEED.fullmatch(name) and path != PACKAGE / "core" / "rng.py":
            found.append(f"line {call.lineno}: {name} seeds a global generator; use medflare.core.rng")
    return found


def _upward(layer: str, target: str, name: str) -> list[str]:
    if target not in RANK:
        return [f"imports {name}, which is in no known layer"]
    if target != layer and RANK[target] <= RANK[layer]:
        return [f"imports {name}: {layer} is not above {target}"]
    return []


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_module_keeps_the_rules(path):
    assert layer_of(path) in {"", *RANK}, "a new top-level module needs a place in the layers (docs/architecture.md)"
    assert violations(path, path.read_text(encoding="utf-8")) == []


def test_files_are_short():
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PYTHON}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


def test_the_layers_are_those_of_the_architecture_note():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text[text.index("## Layers") :].split("\n## ")[0]
    heads = re.findall(r"^    ((?:\w+(?:\.py|/)(?: \| )?)+)", block, flags=re.MULTILINE)
    assert [tuple(re.findall(r"\w+(?=\.py|/)", head)) for head in heads] == list(LAYERS)


BAD = {
    "import nvflare": ("methods/x.py", "only flare/"),
    "def f():\n    from nvflare.apis import dxo": ("evaluation/x.py", "only flare/"),
    "from medflare.flare.exchange.wire import to_dxo": ("local.py", "local is not above flare"),
    "from medflare.federation.local import run_local": ("flare/x.py", "flare is not above local"),
    "from medflare import studies": ("flare/x.py", "flare is not above studies"),
    "import medflare.methods.fedsm.halves": ("inference/x.py", "inference is not above methods"),
    "from medflare.tasks import site": ("core/x.py", "core is not above tasks"),
    "from medflare.helpers import x": ("cli.py", "no known layer"),
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
    "from medflare.methods.base import Step": "methods/x.py",
    "import torch\ntorch.load('x', weights_only=True)": "core/x.py",
    "import torch\ntorch.manual_seed(0)": "core/rng.py",
    "import torch\ntorch.Generator().manual_seed(0)": "tasks/x.py",
    "from medflare.federation.local import run_local": "__init__.py",
}


@pytest.mark.parametrize("source", BAD)
def test_rules_catch(source):
    path, expected = BAD[source]
    assert any(expected in line for line in violations(PACKAGE / path, source))


@pytest.mark.parametrize("source", GOOD)
def test_rules_allow(source):
    assert violations(PACKAGE / GOOD[source], source) == []


def test_relative_imports_are_caught():
    with pytest.raises(AssertionError, match="relative import"):
        violations(PACKAGE / "core" / "x.py", "from . import rng")
