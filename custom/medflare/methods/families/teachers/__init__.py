"""Teachers: a site without all labels also learns from the predictions of another model."""

from functools import partial

from medflare.methods import Method

_row = partial(Method, family="teachers")

CONDIST = _row(
    "condist",
    "Conditional distillation of structures that a site did not annotate",
    "Wang et al., ConDistFL, MICCAI workshops 2023",
    f"{__name__}.condist:ConDistSite",
    f"{__name__}.condist:ConDistServer",
)
MEAN_TEACHER = _row(
    "mean_teacher",
    "Consistency with a mean teacher at sites without labels",
    "Tarvainen and Valpola, Mean teachers, NeurIPS 2017",
    f"{__name__}.mean_teacher:MeanTeacherSite",
    f"{__name__}.mean_teacher:MeanTeacherServer",
)
