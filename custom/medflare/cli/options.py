"""What several subcommands share: options made from dataclasses, the grammar of --set, and where sites find their data."""

import dataclasses
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperGroup

from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

T = TypeVar("T")
AUTO_HELP: Final[dict[str, Any]] = {"rich_markup_mode": None, "add_completion": False}  # plain text: there at once, and to be searched
DEFAULT_ROUNDS: Final = 10
PHANTOM: Final = "phantom"
TASK: Final = "task."  # before the name of a task's setting
SET_HELP: Final = "a setting of the task (task.batch_size=8); may be repeated"

DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder with a subfolder per site (default: MEDFLARE_DATA_ROOT, else images embedded in the task)", metavar="DATA"),
]


# -- how commands are declared -----------------------------------------------------------------------------------------------


class DefaultGroup(TyperGroup):
    """Commands of which one may be left out: `medflare job fedsm` is `medflare job write fedsm`. It is the first one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the first command before arguments that begin with none."""
        if not args or args[0] not in self.commands:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def add_command(group: typer.Typer, name: str, function: Callable[..., int], *examples: str) -> None:
    """Declare a command; its help is the function's docstring, and examples that each stay on their line."""
    paragraphs = ["\b", "examples:", *(f"  {example}" for example in examples)]
    group.command(name, epilog="\n".join(paragraphs))(function)


def takes(name: str, settings: type, skip: Sequence[str] = ()) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command an option for every field of a dataclass.

    Where the fields are annotated with typer's options, the command gets an instance. Else the help is what the docstring says of the
    attribute, and the command gets a mapping of what was named.

    Args:
        name: of the command's parameter that the options come as.
        settings: the dataclass.
        skip: fields without an option.
    """
    fields = [field for field in dataclasses.fields(settings) if field.name not in skip]
    hints, about = typing.get_type_hints(settings, include_extras=True), _attributes(settings)
    declared = any(_is_declared(hints[field.name]) for field in fields)
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    added = []
    for field in fields:
        default, annotation = (empty if field.default is dataclasses.MISSING else field.default), hints[field.name]
        if not declared:
            text = about.get(field.name, "") + ("" if default in (empty, None, "", (), False) else f" (default: {default})")
            default, annotation = None, _option(_plain(typing.get_type_hints(settings)[field.name]), text)
        added.append(inspect.Parameter(field.name, kind, default=default, annotation=annotation))

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        own = [one.replace(kind=kind) for one in inspect.signature(function).parameters.values() if one.name != name]

        def command(**values: Any) -> T:
            named = {field.name: values.pop(field.name) for field in fields}
            if declared:
                return function(**values, **{name: settings(**named)})
            lists = {field.name for field in fields if _plain(typing.get_type_hints(settings)[field.name]) is _Names}
            given = {key: names_in(value) if key in lists else value for key, value in named.items() if value is not None}
            return function(**values, **{name: given})

        command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
        parameters = [*added, *own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


class _Names:
    """A field that holds several names, separated by commas on the command line."""


def _is_declared(hint: Any) -> bool:
    return any(isinstance(one, (typer.models.OptionInfo, typer.models.ArgumentInfo)) for one in getattr(hint, "__metadata__", ()))


def _plain(hint: Any) -> Any:
    """The type of a field without None."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    return _Names if typing.get_origin(hint) in (tuple, list) else hint


def _option(kind: Any, text: str) -> Any:
    if kind is Path:
        return Annotated[Path | None, typer.Option(help=text, show_default=False, parser=_path)]
    kind, metavar = (str, "NAMES") if kind is _Names else (kind, None)
    return Annotated[kind | None, typer.Option(help=text, show_default=False, metavar=metavar)]


def _path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("it is empty, as an unset variable is")
    return Path(text)


def _attributes(settings: type) -> dict[str, str]:
    """What a docstring's section `Attributes:` says of each."""
    section = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).split(", see `")[0].rstrip(".") for name, text in found}


# -- what options say --------------------------------------------------------------------------------------------------------


def set_values(settings: Iterable[str]) -> dict[str, Any]:
    """Name -> value of every --set NAME=VALUE, the last one of a name.

    Raises:
        ConfigError: one has no value.
    """
    from medflare.core.hyper import parsed_value

    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {setting!r} is not NAME=VALUE; write for example lam=0.3 or task.batch_size=8")
        found[name] = parsed_value(value)
    return found


def task_with(source: str | Mapping[str, Any], changes: Mapping[str, Any]) -> "TaskConfig":
    """A task with some settings changed.

    Args:
        source: preset name, JSON file or mapping.
        changes: "task.NAME" -> value; "task.optimizer.lr" reaches into the mapping `optimizer`.

    Raises:
        ConfigError: no such task or setting, or a value that it cannot have.
    """
    from medflare.tasks.config import load_task

    task = load_task(source)
    if not changes:
        return task
    content = task.to_dict()
    for name, value in changes.items():
        if not name.startswith(TASK):
            raise ConfigError(f"--set {name} is no setting of the task; write {TASK}NAME=VALUE")
        *path, last = name.removeprefix(TASK).split(".")
        target = content
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {name}: {part} of task {task.name} is a value and has nothing within; set {part} itself")
        target[last] = value
    return load_task(content)


def names_in(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def site_names(text: str) -> list[str]:
    """Sites by name, or as many as a number says: "2" -> site-1, site-2.

    Raises:
        ConfigError: no site, or one twice.
    """
    names = [f"site-{place + 1}" for place in range(int(text))] if text.isdecimal() else names_in(text)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--sites {text!r}: give a number of sites, 1 or more, or different names separated by commas")
    return names


def refuse_strangers(sites: Iterable[str], task: "TaskConfig") -> None:
    """Raise DataError where a site finds no data for a task; to be called while `data_root` is entered."""
    from medflare.data.loading import resolve_data_root

    for site in sites:
        resolve_data_root(site, task)


def data_root(folder: Path | None) -> AbstractContextManager[None]:
    """While it is entered, sites look for their data in `folder`; None: as before."""
    from medflare.data.loading import ENVIRONMENT

    return _environment(ENVIRONMENT, folder)


def weights_place(place: Path | None) -> AbstractContextManager[None]:
    """While it is entered, the server looks for weights to start from in `place`, a file or a folder; None: as before."""
    from medflare.networks.weights import ENVIRONMENT

    return _environment(ENVIRONMENT, place)


@contextmanager
def _environment(variable: str, path: Path | None) -> Iterator[None]:
    """While it is entered, a variable holds a path, in this process and in those that it starts; None: as before.

    The environment is the one way that reaches the parties of every engine: FLARE's simulator gives each a process of its own.
    """
    before = os.environ.get(variable)
    if path is not None:
        os.environ[variable] = str(path.expanduser().resolve())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
