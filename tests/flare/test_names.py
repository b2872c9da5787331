"""The named classes: one table makes them, FLARE finds every one of them where a job says it is."""

import importlib

import pytest
from nvflare.fuel.utils.class_loader import get_class_name, load_class

from medflare.flare.aggregators import MethodAggregator
from medflare.flare.executors import MedflareExecutor
from medflare.flare.names import NAMES
from medflare.flare.recipes import MedflareRecipe
from medflare.methods.catalogue import get_method

MODULES: dict[str, tuple[str, type]] = {
    "executor": ("medflare.flare.executors", MedflareExecutor),
    "aggregator": ("medflare.flare.aggregators", MethodAggregator),
    "recipe": ("medflare.flare.recipes", MedflareRecipe),
}
TABLE = [(method, column, name) for method, names in NAMES.items() for column, name in names._asdict().items() if name]


@pytest.mark.parametrize(("method", "column", "name"), TABLE)
def test_every_name_leads_to_its_class(method: str, column: str, name: str) -> None:
    module, base = MODULES[column]
    named = getattr(importlib.import_module(module), name)
    assert issubclass(named, base) and named.default_method == method == get_method(method).name
    assert (named.__module__, named.__name__) == (module, name) and named.__doc__
    assert load_class(f"{module}.{name}") is named, "as FLARE reads a job"
    assert get_class_name(named) == f"{module}.{name}", "as FLARE writes one"


def test_no_name_is_given_twice() -> None:
    for column in MODULES:
        names = [name for _, of, name in TABLE if of == column]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("module", [module for module, _ in MODULES.values()])
def test_other_names_are_not_there(module: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'FedMSExecutor'"):
        _ = importlib.import_module(module).FedMSExecutor
