"""What an import of a folder is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from medflare.preparation.dataset_import.chosen_structures import Structure


@dataclass(frozen=True)
class Columns:
    """Names of the columns; "" is recognised by its usual names.

    Labels and masks may be several, separated by commas. Patient, site and split may be in another
    table than the labels.
    """

    image: str = ""  # path of the file, its name, or its name without suffix
    label: str = ""  # the class; or one column of 0 and 1 per finding
    mask: str = ""  # the mask file; or one column per structure
    patient: str = ""  # ID of the patient
    site: str = ""  # name of the site; never guessed
    split: str = ""  # training, validation or test


GUESSED = Columns()


@dataclass(frozen=True)
class ImportOptions:
    """Options of `import_folder`."""

    kind: str = ""  # "segmentation", "classification", or "" for what the folder has
    table: Path | None = None  # the table with the labels
    columns: Columns = GUESSED  # of the table
    patient: str = ""  # regular expression, see `assign_patients`
    # Number of simulated sites that the patients are distributed over; None: one site.
    sites: int | None = None
    # Split -> its share of the patients; None: `datalist.SHARES`.
    shares: Mapping[str, float] | None = None
    seed: int = 0  # of the random splits and sites
    redraw: bool = False  # ignore the splits that the folder names
    classes: tuple[str, ...] = ()  # of all sites, in the order of their numbers
    structures: tuple[Structure, ...] = ()  # to use; (): all of the folder
    # Value from which soft masks are the structure; None: they are refused.
    threshold: float | None = None
    empty_masks: bool = False  # an image without a mask does not show the structure
    leave_out: tuple[str, ...] = ()  # patterns of files and folders that are not read
    skip: bool = False  # leave out images without mask or label
    site_folders: bool = False  # each folder in the folder is a site
    # Folder for the datalists and hard links to the files; None: the folder of the images.
    out: Path | None = None
    copy: bool = False  # copy the files to `out`
    force: bool = False  # replace existing datalists


DEFAULTS = ImportOptions()
