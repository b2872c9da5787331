"""`medflare methods`: a table of all methods; one method with its hyper-parameters."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Annotated

import typer

from medflare.core.errors import ConfigError
from medflare.core.hyper import Described, described

if TYPE_CHECKING:
    from medflare.core.phases import Phase
    from medflare.methods.method import Method

_WIDE = 10_000  # columns, where nothing is wrapped
_PAPERS = "papers"  # methods of no family
_COLUMNS = ("method", "title", "stays at the site", "leaves", "cost", "outside", "DP-SGD")


def methods(
    method: Annotated[str | None, typer.Argument()] = None,
    site_algorithm: str | None = None,
    server_algorithm: str | None = None,
    check: bool = False,
    simulator: bool = False,
) -> int:
    """List the methods by family, those of other installed packages by package, or one method.

    The table says what a site keeps for itself, what leaves it, the processor time of a round
    beside FedAvg's, whether sites that do not train get a model, and whether DP-SGD is possible.
    For one method, each hyper-parameter: its name in --set, its default, the paper's symbol and
    equation, allowed values and its meaning; and what a site receives (in) and sends (out).

    Args:
        method: One method (default: all)
        site_algorithm (METHOD): Use that algorithm of another method
        server_algorithm (METHOD): Use that algorithm of another method
        check: Check the method on a small federation
        simulator: With --check: in FLARE's simulator too

    Examples:
        medflare methods
        medflare methods fedsm
        medflare methods moon --server-algorithm grace
        medflare methods my_method --check
    """
    from medflare.methods.catalogue import get_method, method_names

    if method is None and (site_algorithm or server_algorithm or check):
        raise ConfigError(
            "--check, --site-algorithm and --server-algorithm need a method: "
            "medflare methods METHOD --check"
        )
    if simulator and not check:
        raise ConfigError("--simulator belongs to --check; give both")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    if method is not None:
        pair = get_method(method, site=site_algorithm, server=server_algorithm)
        if check:
            return _checked(pair, simulator)
        print(method_listing(pair, width))
        return 0
    failed = 0
    listed = []
    for name in method_names():
        try:
            listed.append(method_row(get_method(name)))
        except ConfigError as error:  # a broken package must not hide the other methods
            print(f"medflare: {error}", file=sys.stderr)
            failed = 1
    print(methods_table(listed, width))
    return failed


def _checked(method: "Method", simulator: bool) -> int:
    """Print the checks of a method; 1 if it fails one."""
    from medflare.testing import check_method

    def say(name: str) -> None:
        print(f"{name} ...", file=sys.stderr)

    failed = False
    for check in check_method(method, simulator=simulator, say=say):
        print(f"{check.name}: {check.problem or 'passed'} ({check.seconds:.0f} s)")
        failed |= bool(check.problem)
    return int(failed)


def method_row(method: "Method") -> dict[str, str]:
    """A method's row of the table."""
    from medflare.methods.catalogue import distribution_of

    leaves: dict[str, None] = {}
    for phase in method.site_class.phases.values():
        leaves |= dict.fromkeys(spec.name for spec in phase.reply)
    costs = resources.files("medflare.methods") / "costs.json"  # of benchmarks/cost.py
    cost = json.loads(costs.read_text(encoding="utf-8")).get(method.name)
    return {
        "family": distribution_of(method.name) or method.family,
        "method": method.name,
        "title": method.title,
        "stays at the site": method.stays,
        "leaves": ", ".join(leaves),
        "cost": "" if cost is None else f"{cost:.1f}",
        "outside": "yes" if method.outside else "no",
        "DP-SGD": "no" if method.dp_unsupported_reason else "yes",
    }


def methods_table(rows: Iterable[Mapping[str, str]], width: int) -> str:
    """The methods by family or distribution, those of the papers first, in lines of at most `width`
    characters.
    """
    from rich.console import Console
    from rich.table import Table

    families: dict[str, list[Mapping[str, str]]] = {_PAPERS: []}
    for row in rows:
        families.setdefault(row["family"] or _PAPERS, []).append(row)
    console = Console(width=min(width, 160), no_color=True, highlight=False)
    with console.capture() as captured:
        for family, of_family in families.items():
            console.print(f"\n{family}")
            table = Table(box=None, pad_edge=False)
            for column in _COLUMNS:
                table.add_column(column, overflow="fold")
            for row in of_family:
                table.add_row(*(row[column] for column in _COLUMNS))
            console.print(table)
        console.print("\nmedflare methods METHOD shows the settings of one method.")
    return "\n".join(line.rstrip() for line in captured.get().strip().splitlines())


def method_listing(method: "Method", width: int = _WIDE) -> str:
    """A method's title, paper, hyper-parameters and messages, in lines of at most `width`
    characters.

    The site algorithm's hyper-parameters come first, then the server's.
    """
    algorithms = {algorithm: described(owner) for algorithm, owner in method.hyper_classes.items()}
    lines = [f"{method.name}: {method.title}", f"  {method.paper}"]
    models = ", ".join(method.roles)
    if not method.trains:
        models = "none that is new, it trains nothing"
    elif not method.outside:
        models += "; none for outside sites"
    lines.append(f"  models: {models}")
    if method.stays:
        lines.append(f"  stays at the site: {method.stays}")
    for (algorithm, fields), origin in zip(algorithms.items(), method.algorithms, strict=True):
        heading = algorithm
        if origin != method.name:
            heading += f" algorithm of {origin}"
        if not fields:
            heading += ": no hyper-parameters"
        lines.append(f"  {heading}")
        for name, about in fields.items():
            ambiguous = all(name in names for names in algorithms.values())
            lines += _entry(f"{algorithm}.{name}" if ambiguous else name, about)
    lines.append("  exchanged")
    for phase in method.site_class.phases.values():
        lines += _exchange(phase)
    return "\n".join(_wrapped(line, width) for line in filter(str.strip, lines))


def _exchange(phase: "Phase") -> list[str]:
    """What the server's message and the site's reply of a phase can have, and why it leaves."""
    from medflare.federation.settings import FINALIZE

    received = dict.fromkeys(spec.name for spec in (*phase.request, *phase.request_meta))
    sent = dict.fromkeys(spec.name for spec in (*phase.reply, *phase.meta))
    if phase.name == FINALIZE:  # measured by the participant
        sent["test metrics"] = None
    text = f"in {', '.join(received) or 'nothing'}; out {', '.join(sent) or 'nothing'}"
    purposes = [f"        {spec.name}: {spec.purpose}" for spec in phase.reply]
    return [f"    {phase.name}: {text}", *purposes]


def _entry(name: str, about: Described) -> list[str]:
    """Name, default, symbol, source and the allowed values of a hyper-parameter; then its meaning.

    Allowed values are shown if not any value of its type is allowed.
    """
    from medflare.evaluation.presentation import format_setting

    if about.choices:
        allowed = ", ".join(map(format_setting, about.choices))
    elif about.low is not None and about.high is not None:
        allowed = f"{about.low:g} to {about.high:g}"
    elif about.low is not None:
        allowed = f"≥ {about.low:g}"
    elif about.high is not None:
        allowed = f"≤ {about.high:g}"
    else:
        allowed = ""
    origin = ", ".join(filter(None, (about.symbol, about.source)))
    details = "; ".join(filter(None, (origin, allowed)))
    setting = f"    {name} = {format_setting(about.default)}"
    if details:
        setting += f"  [{details}]"
    return [setting, f"        {about.text}"]


def _wrapped(line: str, width: int) -> str:
    """The line in lines of at most `width` characters; continued ones are indented further."""
    indent = line[: -len(line.lstrip())] + "  "
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
