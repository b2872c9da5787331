"""What several subcommands share: how they are declared, their options, the grammar of --set, and where sites find their data."""

import argparse
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from medflare.methods.method import Method
    from medflare.tasks.config import TaskConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DEFAULT_ROUNDS: Final = 10
EVALUATE: Final = "evaluate"  # in place of a method: no rounds, the final models are the one that was given
_METHODS: Final = "fedavg, fedsm, ...; `medflare methods` lists them with their hyper-parameters"
_NO_TRAINING: Final = f"nobody trains, and every site does what the name says: {EVALUATE} (--model) or fingerprint (its training images)"
PHANTOM: Final = "phantom"
_TASK: Final = "task."  # before the name of a task's setting

# What is no hyper-parameter either, beside the settings of a run; each is an option of some subcommand.
_OTHER_OPTIONS: Final = frozenset({"sites", "data_root", "resplit", "site_half", "server_half", "out"})


def add_command(
    commands: Commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str = "",
    examples: Iterable[str],
) -> argparse.ArgumentParser:
    """Declare a subcommand.

    Args:
        commands: what the parser of medflare collects subcommands in.
        name: of the subcommand.
        command: called with the options; returns the exit status.
        help: its line among the subcommands.
        description: what its own help begins with; like `help` where it is empty.
        examples: command lines for the end of its own help.

    Returns:
        The parser that takes its options.
    """
    about = description or f"{help[0].upper()}{help[1:]}."
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(about, shutil.get_terminal_size().columns - 2),
        epilog="\n  ".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example stays on its line
    )
    parser.set_defaults(command=command)
    return parser


# -- options ---------------------------------------------------------------------------------------------------------------


def add_federation_options(parser: argparse.ArgumentParser) -> None:
    """The method with its halves and hyper-parameters, the task, and the settings of the run."""
    add_method_options(parser, about=f"{_METHODS}; or {_NO_TRAINING}")
    add_task_options(parser, "a hyper-parameter (lam=0.3, where both halves have it site.beta=1 or server.beta=1)", "that of MODEL, else ")
    parser.add_argument("--network", metavar="NAME", help="the task's network is another one, with its defaults (docs/learning.md)")
    about = "start from the weights that a package brings for the network (efficientnet_lite0), with their hash and scale of intensities"
    parser.add_argument("--pretrained", action="store_true", help=about)
    about = "go on from a delivered model of one network (its folder), with its task where --task names no other"
    parser.add_argument("--from", "--model", dest="model", type=Path, metavar="MODEL", help=about)
    parser.add_argument("--resplit", type=int, metavar="SEED", help="draw the training / validation / test split anew by patient")
    run = parser.add_argument_group("settings of the run")
    add_rounds(run)
    run.add_argument("--seed", type=int, default=0, help="seed of everything that is drawn (default: %(default)s)")
    run.add_argument("--outside", default="", metavar="NAMES", help="comma-separated sites that only receive the final models")
    run.add_argument("--min-sites", type=int, metavar="N", help="usable answers a step needs (default: 2); a job starts with no fewer")
    run.add_argument("--sites-per-round", type=int, metavar="N", help="draw this many sites for each round (default: all)")
    run.add_argument("--max-share", type=float, metavar="SHARE", help="of all training images a site counts for at most (default: any)")
    run.add_argument("--suspects", choices=("used", "rejected"), help="what becomes of updates against all others (default: used)")
    run.add_argument("--patience", type=int, metavar="ROUNDS", help="end after so many rounds without a better model (default: all rounds)")
    run.add_argument("--wire", choices=("fp32", "bf16"), help="form in which weights travel; bf16: half the bytes (default: fp32)")
    flare = parser.add_argument_group("settings of the run under FLARE (a plain loop waits for nobody)")
    flare.add_argument(
        "--step-timeout", type=float, metavar="SECONDS", help="go on without sites that have not answered by then (default: wait)"
    )
    flare.add_argument(
        "--enrol-timeout", type=float, metavar="SECONDS", help="begin without sites that are not ready by then (default: 3600; 0: wait)"
    )
    flare.add_argument("--silence", type=float, metavar="SECONDS", help="without a sign of life a site counts as gone (default: 120)")


def add_method_options(parser: argparse.ArgumentParser, *, optional: bool = False, about: str = _METHODS) -> None:
    """A method by name, and the halves of other methods in it."""
    parser.add_argument("method", nargs="?" if optional else None, help="one method (default: all)" if optional else about)
    parser.add_argument("--site-half", metavar="METHOD", help="use the site half of another method")
    parser.add_argument("--server-half", metavar="METHOD", help="use the server half of another method")


def add_task_options(parser: argparse.ArgumentParser, settings: str = "", first: str = "") -> None:
    """The task and --set.

    Args:
        parser: of a subcommand.
        settings: what --set takes beside the task's settings.
        first: the default before the usual one, see `hyper_and_task`.
    """
    default = None if first else PHANTOM
    about = f"preset name or a JSON file, see app_configs/ (default: {first}{PHANTOM}, synthetic)"
    parser.add_argument("--task", default=default, help=about)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"{settings}{' or ' if settings else ''}a setting of the task (task.batch_size=8); may be repeated",
    )


def add_rounds(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", first: str = "") -> None:
    """--rounds.

    Args:
        parser: of a subcommand, or a group of its options.
        first: the default before the usual one, which the subcommand then knows by itself.
    """
    about = f"federation rounds (default: {first}{DEFAULT_ROUNDS})"
    parser.add_argument("--rounds", type=int, default=None if first else DEFAULT_ROUNDS, help=about)


def add_data_root(parser: argparse.ArgumentParser) -> None:
    """--data-root, to be entered as `data_root`."""
    about = "folder with a subfolder per site (default: MEDFLARE_DATA_ROOT, else images embedded in the task, where it has some)"
    parser.add_argument("--data-root", type=Path, metavar="DATA", help=about)


def run_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of the run and the choice of halves, as both engines take them; what has a default of FLARE's is left out."""
    names = ("seed", "min_sites", "sites_per_round", "site_half", "server_half")
    defaulted = ("step_timeout", "enrol_timeout", "silence", "max_share", "suspects", "patience", "wire")
    chosen = {name: value for name in defaulted if (value := getattr(options, name)) is not None}
    return {**{name: getattr(options, name) for name in names}, "outside": names_in(options.outside), **chosen}


# -- what they say ---------------------------------------------------------------------------------------------------------


def chosen_method(options: argparse.Namespace) -> "Method":
    """The method, with the halves of others where they were asked for; "evaluate" and surveys become federations without rounds.

    Raises:
        ConfigError: no such method, or nothing to evaluate.
    """
    from medflare.methods.catalogue import SURVEYS, get_method

    if options.method in SURVEYS:
        options.rounds = 0
    if options.method == EVALUATE:
        if options.model is None:
            raise ConfigError("evaluate: say which model with --model FOLDER, for example runs/fedavg-phantom-seed0/models/global")
        options.method, options.rounds = "fedavg", 0
    return get_method(options.method, site=options.site_half, server=options.server_half)


def hyper_and_task(options: argparse.Namespace, method: "Method") -> "tuple[dict[str, Any], TaskConfig]":
    """The hyper-parameters under their halves and the task, from --set, --task, --network, --pretrained, --resplit and --from.

    Raises:
        ConfigError: a name that neither the method nor the task has, a value that the task cannot have, or a model that does not fit it.
    """
    from medflare.core.hyper import described, halved
    from medflare.federation.settings import RUN_SETTINGS

    given = set_values(options.set)
    hyper = {name: value for name, value in given.items() if not name.startswith(_TASK)}
    owned = {name for owner in method.hyper_classes.values() for name in described(owner)}
    for name in hyper:
        if name not in owned and (name in RUN_SETTINGS or name in _OTHER_OPTIONS):
            remedy = f": use --{name.replace('_', '-')}" if name in options else ""
            raise ConfigError(f"{name} is a setting of the run, not a hyper-parameter of {method.name}{remedy}")
    changes = {name: value for name, value in given.items() if name.startswith(_TASK)}
    if options.network is not None:
        changes = {f"{_TASK}network": {"name": options.network}} | changes
    if options.resplit is not None:
        changes[f"{_TASK}resplit"] = options.resplit
    source = options.task or PHANTOM
    if options.model is not None:
        if options.pretrained:
            raise ConfigError("--pretrained: --from says what training starts from; leave one of them out")
        from medflare.inference.deployed import WEIGHTS_FILE, load_model

        model = load_model(options.model)
        changes[f"{_TASK}network.weights"] = {"file": WEIGHTS_FILE, "sha256": model.card["sha256"], "format": "medflare"}
        source = options.task or model.task.to_dict()
    task = task_with(source, changes)
    if options.pretrained:
        from medflare.networks.weights import pretrained_settings

        task = task_with(task.to_dict() | pretrained_settings(task), {})
    if options.model is not None:
        from medflare.networks.weights import starting_state

        starting_state(task, 0, options.model)  # a model of another task is refused before a job is written
    return halved(hyper, method.hyper_classes, method.name), task


def set_values(settings: Sequence[str]) -> dict[str, Any]:
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
        if not name.startswith(_TASK):
            raise ConfigError(f"--set {name} is no setting of the task; write {_TASK}NAME=VALUE")
        *path, last = name.removeprefix(_TASK).split(".")
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
    """Nothing where every site finds its data; to be called while `data_root` is entered.

    Args:
        sites: names.
        task: what the data are for.

    Raises:
        DataError: a site without data, with the nearest names that have some.
    """
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
