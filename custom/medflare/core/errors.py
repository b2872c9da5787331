"""Errors whose text is one line that names the problem, the place and the remedy."""

from medflare.core.text import printable

# File of tracebacks, at a site in its folder of a job: they may name images and patients.
ERRORS = "errors.log"
_LONGEST = 200  # characters of another library's error


def one_line(error: BaseException) -> str:
    """The text of another library's error as a part of a line; its type if it has no text.

    Examples:
        >>> one_line(ValueError("size mismatch:\\n  (2, 3)")), one_line(KeyError())
        ('size mismatch: (2, 3)', 'KeyError')
    """
    return printable(str(error)[: 2 * _LONGEST])[:_LONGEST] or type(error).__name__


class MedflareError(Exception):
    """Base of the errors that medflare raises on purpose."""

    def __init__(self, text: object = ""):
        super().__init__(printable(str(text)))


class ConfigError(MedflareError):
    """A task, method or job setting is wrong."""


class DataError(MedflareError):
    """A site's data cannot be used as it is."""


class UnreadableError(DataError):
    """A file is damaged, or of no known format."""


class UpdateError(MedflareError):
    """A site's update cannot be accepted by the server."""


class MessageError(MedflareError):
    """A server's message cannot be used by a site."""


class StateError(MedflareError):
    """A stored state is missing, damaged or belongs to another site or run."""


class PrivacyError(MedflareError):
    """A site's privacy budget does not allow the training."""


class ExportError(MedflareError):
    """A model cannot be exported, or the exported model gives other values."""


class FederationFailed(MedflareError):
    """The federation cannot continue (too few usable updates, a site that cannot take part)."""


class StepFailed(Exception):
    """What the code of a method raised in a step of a run, one line; its cause is that error."""


class Aborted(MedflareError):
    """The run was stopped from outside."""
