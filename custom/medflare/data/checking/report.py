"""What a check of data found, and the same as text."""

from dataclasses import dataclass, field
from pathlib import Path

from medflare.tasks.config import TaskConfig

_MOST_SIZES = 3  # shown per site


@dataclass
class SiteReport:
    """What one site's folder holds.

    Attributes:
        splits: split -> (images, patients); a volume counts by its slices.
        sizes: stored size as text -> files.
        classes: class -> its training images, or pixels (segmentation).
        intensity: minimum, mean, deviation and maximum of the stored intensities.
        notes: unusual but allowed.
        left_out: images that cannot be used and that the task allows to skip, one line each.
        problems: what keeps the site from joining, and structures that the training masks lack for no reason given, one line each.
    """

    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    intensity: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class CheckReport:
    """What a data root holds for a task.

    Attributes:
        shift: see `shift.site_shift`; None where it cannot be measured, for `shift_reason`.
        thumbnails: the contact sheet, where one was asked for.
    """

    task: TaskConfig
    root: Path
    sites: dict[str, SiteReport]
    shift: float | None = None
    shift_reason: str = ""
    thumbnails: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every site can join."""
        return not any(report.problems for report in self.sites.values())

    def render(self) -> str:
        """The report as text: what every site has, its notes and problems, then the verdict."""
        lines = [f"{self.root}, task {self.task.name}"]
        for name, report in self.sites.items():
            lines += ["", name, *(f"  {line}" for line in self._described(report))]
            lines += [f"  note: {note}" for note in report.notes]
            lines += [f"  left out: {line}" for line in report.left_out]
            lines += [f"  PROBLEM: {problem}" for problem in report.problems]
        if self.shift is None:
            lines += ["", f"shift between sites: not measured, {self.shift_reason}"]
        else:
            chance = f"chance {1 / len(self.sites):.2f}"
            lines += ["", f"shift between sites: {self.shift:.2f} balanced accuracy of telling the site from a thumbnail ({chance})"]
        lines += [f"thumbnails, a row for each site: {self.thumbnails}"] if self.thumbnails else []
        lines.append("OK" if self.ok else "NOT OK: solve the problems above and check again")
        return "\n".join(lines)

    def _described(self, report: SiteReport) -> list[str]:
        """A site's counts, sizes, classes and intensities, a line each; what could not be read is left out."""
        unit = ("pixels" if self.task.spatial_dims == 2 else "voxels") if self.task.kind == "segmentation" else "images"
        found = {split: f"{images} images of {patients} patients" for split, (images, patients) in report.splits.items()}
        found["stored sizes"] = ", ".join(f"{size} ({files})" for size, files in list(report.sizes.items())[:_MOST_SIZES])
        if len(report.sizes) > _MOST_SIZES:
            found["stored sizes"] += f" and {len(report.sizes) - _MOST_SIZES} more"
        found[f"training {unit}"] = ", ".join(f"{label} {number}" for label, number in report.classes.items())
        if report.intensity:
            words = "{minimum:.4g} to {maximum:.4g}, mean {mean:.4g}, sd {deviation:.4g}"
            found["intensities"] = words.format(**report.intensity)
        column = max(map(len, found)) + 2
        return [f"{name:{column}}{value}" for name, value in found.items() if value]
