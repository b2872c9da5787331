"""Packages that a site may do without: a job that carries medflare's code runs on what torch, MONAI and FLARE bring along."""

from importlib.util import find_spec

from medflare.core.errors import ConfigError, MedflareError

# Names to install by, where they are not the names to import by.
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    return find_spec(module) is not None


def require(module: str, purpose: str, error: type[MedflareError] = ConfigError) -> None:
    """Go on only where a package is installed.

    Args:
        module: its top-level module.
        purpose: what needs it, the beginning of the message.

    Raises:
        error: it is not; the message names the package and the command that installs it.
    """
    if not installed(module):
        name = _DISTRIBUTIONS.get(module, module)
        raise error(f"{purpose} needs the package {name}, which is not installed here: pip install {name}")
