"""The modules of the room stand above one another: no circle, lazy imports and those for type checkers included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import medflare.evaluation

ROOM = Path(medflare.evaluation.__path__[0])
NAME = "medflare.evaluation"


def imported(path: Path) -> set[str]:
    """The room's own modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix(f"{NAME}.").split(".")[0] for name in found if name.startswith(f"{NAME}.")}


def test_no_circle() -> None:
    modules = {path.stem: imported(path) for path in ROOM.glob("*.py")}
    order = list(TopologicalSorter({name: found & set(modules) for name, found in modules.items()}).static_order())
    assert order.index("names") < order.index("figures") < order.index("report") < order.index("results") < order.index("console")
    assert modules["names"] == set(), "what everybody shares needs nobody"
