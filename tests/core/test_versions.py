"""Versions come from the installed packages; what is not installed is left out."""

import platform

import torch

from medflare.core.packages import installed_versions


def test_versions_of_what_is_installed() -> None:
    versions = installed_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert set(versions) <= {"python", "medflare", "nvflare", "torch", "monai", "numpy"}
