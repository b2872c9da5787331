"""Imports of a package that Python makes on first use, written as plain imports.

    if TYPE_CHECKING:
        from medflare.methods.fedsm.formulas import soft_pull

    __getattr__, __dir__ = lazy_imports(__name__, __file__)

Type checkers, editors and grep read the imports as they are, and importing the package stays light
(PEP 562). `lazy_loader` does the same for a package's own modules alone, from a stub beside it.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_imports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: the names that its `if TYPE_CHECKING` imports.

    Args:
        package: `__name__` of the package.
        file: its `__file__`.
    """
    modules: dict[str, str] = {}  # name -> module
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom):
                    modules |= {alias.name: str(line.module) for alias in line.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get, lambda: sorted(modules)
