"""The package as part of a job, for sites that have torch, MONAI and FLARE, but not medflare."""

import shutil
from pathlib import Path

import medflare

_README = """\
# medflare {version}

This job carries its own code: the package as it was where the job was written. Sites and server need Python with torch, MONAI
and FLARE. Where medflare is installed as well, FLARE takes the installed one.

Beyond the embedded synthetic images a site needs what decodes its files: pillow for PNG, JPEG and TIFF, nibabel for NIfTI,
pydicom for DICOM. Without scipy HD95 is undefined, without matplotlib the report has no figures. TensorBoard files are not written;
metrics.jsonl has the numbers.
"""


def copy_package(folder: Path) -> Path:
    """Copy the running package into `folder`/medflare, without compiled files, beside a README; returns `folder`."""
    package = Path(medflare.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (folder / "README.md").write_text(_README.format(version=medflare.__version__), encoding="utf-8")
    return folder


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
