"""What several subcommands share: options made from dataclasses, --set NAME=VALUE, sites."""

import copy
import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from medflare.core.errors import ConfigError
from medflare.core.settings import check_site_name, unknown
from medflare.core.text import Json, JsonDict, read_json
from medflare.data.local import DATA_ROOT_VARIABLE, DEVICE_VARIABLE

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

AUTO_HELP: JsonDict = {"rich_markup_mode": None, "add_completion": False, "no_args_is_help": True}
DEFAULT_ROUNDS = 10
PHANTOM = "phantom"
TASK = "task."  # prefix of a task's setting in --set

PathArgument = Annotated[Path, typer.Argument()]
PathArguments = Annotated[list[Path], typer.Argument()]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        help="Folder with a subfolder per site (default: MEDFLARE_DATA_ROOT, "
        "else images embedded in the task)",
        metavar="DATA",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Of the networks: cpu, cuda, cuda:1, ... (default: MEDFLARE_DEVICE, else cpu)"
    ),
]
Track = Annotated[
    str | None,
    typer.Option(
        help="Where the run's curves, test metrics and settings go (default: "
        "TensorBoard files beside results.json)",
        metavar="tensorboard|mlflow[=URI]|wandb[=PROJECT]|none",
    ),
]
_Command = Callable[..., Any]
_ENTRY = r"^    (\S.*(?:\n {5,}.+)*)"  # of a section of a docstring


def _take_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of a JSON file the defaults of a command's options.

    Raises:
        ConfigError: it is no file of options.
    """
    if file is None or context.resilient_parsing:
        return file
    try:
        content = read_json(file)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--options {file}: not valid JSON ({error}); correct the file"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f'--options {file}: one JSON object is needed, for example {{"rounds": 20}}'
        )
    names = {}  # name of an option, as it is written -> its parameter
    for parameter in context.command.params:
        for written in (parameter.name or "", *parameter.opts):
            names[written.lstrip("-").replace("-", "_")] = parameter
    del names["options"], names["options_file"]
    values = {}
    for name, value in content.items():
        option = names.get(name.replace("-", "_"))
        if option is None:
            raise unknown("option", name, names, f"--options {file}")
        if isinstance(value, dict):
            raise ConfigError(
                f"--options {file}: {name} is an object; "
                "write it as the option has it on the command line"
            )
        several = getattr(option, "multiple", False)
        if isinstance(value, list) and not several:
            value = ",".join(map(str, value))
        elif several and isinstance(value, str):
            value = [value]
        values[option.name] = value
    context.default_map = values
    return file


OptionsFile = Annotated[
    Path | None,
    typer.Option(
        "--options",
        metavar="FILE",
        is_eager=True,
        callback=_take_file,
        help='JSON file with options by name, {"rounds": 20, "set": ["lam=0.3"]}; '
        "the command line has priority over it",
    ),
]


class DefaultGroup(TyperGroup):
    """A group whose first command may be omitted.

    `medflare job fedsm` is `medflare job create fedsm`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the first command if the arguments begin with none."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def add_commands(group: typer.Typer, **commands: _Command) -> None:
    """Add commands by name; their docstrings are their help.

    A section `Args:` has the help texts of arguments and options, as `name (METAVAR): text`; a
    METAVAR with a colon stands in the annotation. A section `Examples:` has command lines, which
    are shown at the end.
    """
    for name, function in commands.items():
        documentation = inspect.getdoc(function) or ""
        summary = re.split(r"\n\n(?:Args|Examples):\n", documentation)[0]
        examples = re.findall(_ENTRY, _section(documentation, "Examples"), re.MULTILINE)
        lines = ["\b", "examples:", *(f"  {_joined(example)}" for example in examples)]
        command = _with_options(function, _described(documentation, "Args"))
        group.command(name, help=summary, epilog="\n".join(lines))(command)


def _with_options(function: _Command, described: Mapping[str, tuple[str | None, str]]) -> _Command:
    """Make the described parameters options, unless their annotation has an argument or an option.

    An option that is False by default has no --no-NAME.
    """
    signature = inspect.signature(function)
    parameters = dict(signature.parameters)
    for name, (metavar, text) in described.items():
        hint = parameters[name].annotation
        if typing.get_origin(hint) is Annotated:
            hint, info = typing.get_args(hint)
            info = copy.copy(info)  # other commands may share it
        elif parameters[name].default is False:
            info = typer.Option(f"--{name.replace('_', '-')}")
        else:
            info = typer.Option()
        info.metavar = metavar or info.metavar
        info.help = text
        parameters[name] = parameters[name].replace(annotation=Annotated[hint, info])
    signature = signature.replace(parameters=list(parameters.values()))
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def takes(name: str, settings: type, skip: Sequence[str] = ()) -> Callable[[_Command], _Command]:
    """Give a command an option for every field of a dataclass.

    The section `Attributes:` of the docstring has the help texts; a field that is not there is
    annotated with typer's option. The command receives a mapping of the options that were used.
    `name`: the command's parameter that receives it; `skip`: fields without an option.
    """
    described: dict[str, tuple[str | None, str]] = {}
    for cls in reversed(settings.__mro__):
        described |= _described(inspect.cleandoc(cls.__doc__ or ""), "Attributes")
    hints = typing.get_type_hints(settings, include_extras=True)
    plain_hints = typing.get_type_hints(settings)
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = {}
    for field in dataclasses.fields(settings):
        if field.name in skip:
            continue
        default = field.default
        annotation = hints[field.name]
        if field.name in described:
            metavar, text = described[field.name]
            text = re.sub(r"[ ,(]*see `[^`]*`\)?", "", text)
            text = re.sub(r"\bNone: ", "default: ", text).rstrip(".")
            if default not in (dataclasses.MISSING, None, "", (), False):
                text += f" (default: {default})"
            default = None
            annotation = _option(_plain_type(plain_hints[field.name]), metavar, text)
        elif default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        added[field.name] = inspect.Parameter(
            field.name, keyword, default=default, annotation=annotation
        )

    def decorate(function: _Command) -> _Command:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            options = {field: values.pop(field) for field in added}
            used = {key: value for key, value in options.items() if value is not None}
            return function(**values, **{name: used})

        original = inspect.signature(function).parameters.values()
        rest = [item.replace(kind=keyword) for item in original if item.name != name]
        signature = inspect.Signature([*added.values(), *rest])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def _plain_type(hint: Any) -> Any:
    """The type of a field without None; `list` for several names."""
    if type(None) in typing.get_args(hint):
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (tuple, list):
        return list
    return hint


def _option(kind: Any, metavar: str | None, text: str) -> Any:
    parser: Callable[[str], Any] | None = None
    if kind is Path:
        parser = _path
    elif kind is list:
        parser = names_in
        metavar = "NAMES"
    option = typer.Option(help=text, show_default=False, parser=parser, metavar=metavar)
    return Annotated[kind | None, option]


def _path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("the path is empty, as from an unset variable")
    return Path(text)


def _section(documentation: str, heading: str) -> str:
    return documentation.partition(f"{heading}:\n")[2].partition("\n\n")[0]


def _joined(entry: str) -> str:
    return re.sub(r"\n +", " ", entry)


def _described(documentation: str, heading: str) -> dict[str, tuple[str | None, str]]:
    """Name -> (metavar, text) of the entries in a section of a docstring."""
    described = {}
    for entry in re.findall(_ENTRY, _section(documentation, heading), re.MULTILINE):
        head, _, text = _joined(entry).partition(": ")
        name, _, metavar = head.partition(" (")
        described[name] = metavar.removesuffix(")") or None, text
    return described


def refuse_used(reason: str, **values: Any) -> None:
    """Raise ConfigError, which ends in the reason, if an option has a value: not None or False."""
    for name, value in values.items():
        if value is not None and value is not False:
            raise ConfigError(f"--{name.replace('_', '-')} {reason}")


def set_values(settings: Iterable[str]) -> Json:
    """Name -> value of every --set NAME=VALUE, the last one of a name.

    Raises:
        ConfigError: a setting is not of that form.
    """
    from medflare.core.hyper import parsed_value

    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--set {setting!r} is not NAME=VALUE; "
                "write for example lam=0.3 or task.batch_size=8"
            )
        values[name] = parsed_value(value)
    return values


def task_with(source: str | Json, changes: Json) -> "TaskConfig":
    """The task of a preset name, JSON file or mapping with some settings changed.

    `changes`: "task.NAME" -> value; "task.optimizer.lr" reaches into the mapping `optimizer`.
    ConfigError: an unknown task or setting, or an invalid value.
    """
    from medflare.tasks.config import load_task

    content = load_task(source).to_dict()
    for name, value in changes.items():
        *path, last = name.removeprefix(TASK).split(".")
        target = content
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(
                    f"--set {name}: {part} of task {content['name']} is a value without settings; "
                    f"set {part} itself"
                )
        target[last] = value
    return load_task(content)


def names_in(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def site_names(text: str) -> list[str]:
    """Names of sites, from their names or their number: "2" -> site-1, site-2.

    Raises:
        ConfigError: there is none, or a name is there twice.
    """
    if text.isdecimal():
        names = [f"site-{index + 1}" for index in range(int(text))]
    else:
        names = names_in(text)
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"--sites {text!r}: give a number of sites, 1 or more, "
            "or different names separated by commas"
        )
    for name in names:
        check_site_name(name)
    return names


def default_sites(data_root: Path | None) -> list[str]:
    """Names of the sites with a folder in the data root, DataError if it has none; without a data
    root, four sites with embedded images.
    """
    from medflare.data.datalist import site_folders, site_name

    root = data_root or os.environ.get(DATA_ROOT_VARIABLE)
    if not root:
        return site_names("4")
    return [site_name(folder) for folder in site_folders(Path(root).expanduser())]


def check_sites(sites: Iterable[str], task: "TaskConfig", text: str | None = None) -> None:
    """Raise DataError if a site has no data for a task, ConfigError if `text`, of --sites, is one
    name where any name has images; call it inside `environment(...)`.
    """
    from medflare.data.loading import resolve_data_root

    folders = [resolve_data_root(site, task) for site in sites]
    if folders == [None] and text and not text.isdecimal():
        raise ConfigError(
            f"--sites {text!r} is one name, not a number; give a number, for example 4, "
            "several names, or --data-root with images of this site"
        )


@contextmanager
def environment(
    data_root: Path | None = None, weights: Path | None = None, device: str | None = None
) -> Iterator[None]:
    """Set MEDFLARE_DATA_ROOT, MEDFLARE_WEIGHTS and MEDFLARE_DEVICE for the block.

    None leaves a variable as it is. They reach the parties of every engine: FLARE's simulator
    starts a process for each. ConfigError: this machine has no such device.
    """
    from medflare.networks.weights import WEIGHTS_VARIABLE

    values = {}
    for name, path in ((DATA_ROOT_VARIABLE, data_root), (WEIGHTS_VARIABLE, weights)):
        if path is not None:
            values[name] = str(path.expanduser().resolve())
    if device is not None:
        from medflare.training.computing import usable_device

        values[DEVICE_VARIABLE] = str(usable_device(device, "--device", initialize=False))
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)
