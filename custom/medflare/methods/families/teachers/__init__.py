"""Teachers: a site without all labels also learns from the predictions of another model."""

from medflare.methods.method import Method


def _teacher(name: str, title: str, paper: str, module: str, algorithm: str) -> Method:
    """A row: the algorithms of a module of this package, without their "Site" and "Server"."""
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=f"{__name__}.{module}:{algorithm}Site",
        server=f"{__name__}.{module}:{algorithm}Server",
        family="teachers",
    )


CONDIST = _teacher(
    "condist",
    "Conditional distillation of structures that a site did not annotate",
    "Wang et al., ConDistFL, MICCAI workshops 2023",
    "condist",
    "ConDist",
)
MEAN_TEACHER = _teacher(
    "mean_teacher",
    "Consistency with a mean teacher at sites without labels",
    "Tarvainen and Valpola, Mean teachers, NeurIPS 2017",
    "mean_teacher",
    "MeanTeacher",
)
