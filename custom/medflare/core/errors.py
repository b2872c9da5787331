"""Errors that a person can act on: one line that names the offender, the place and the remedy."""

from typing import Final

from medflare.core.text import printable

_LONGEST: Final = 200  # characters of what another library says


def one_line(error: BaseException) -> str:
    """What an error of another library says, as a part of a line; its kind where it says nothing.

    Examples:
        >>> one_line(ValueError("size mismatch:\\n  (2, 3)")), one_line(KeyError())
        ('size mismatch: (2, 3)', 'KeyError')
    """
    return printable(str(error)[: 2 * _LONGEST])[:_LONGEST] or type(error).__name__


class MedflareError(Exception):
    """Base of every error that medflare raises on purpose; its text is one clear line, whatever names it repeats."""

    def __init__(self, text: object = ""):
        super().__init__(printable(str(text)))


class ConfigError(MedflareError):
    """A task, method or job setting is wrong."""


class DataError(MedflareError):
    """A site's data cannot be used as it is."""


class UpdateError(MedflareError):
    """A site's update cannot be accepted by the server."""


class MessageError(MedflareError):
    """What a server sends cannot be used by a site."""


class StateError(MedflareError):
    """A stored state is missing, damaged or belongs to somebody else."""


class PrivacyError(MedflareError):
    """A site's privacy budget does not allow what was asked of it."""


class ExportError(MedflareError):
    """A model cannot be exported, or what was exported gives other numbers."""


class FederationFailed(MedflareError):
    """The federation cannot go on (too few usable updates, a failed site under a strict policy)."""


class Aborted(MedflareError):
    """The run was asked to stop from outside."""
