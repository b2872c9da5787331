"""What a model scored patient by patient: what a site's mean is made of, for tests that pair two models on the same patients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Cases:
    """A model's answers to one split. They speak of single patients: they stay where the images are.

    Attributes:
        patients: segmentation: every patient once; classification: the patient of every image.
        values: segmentation: metric -> float64 (patients,), the mean over a patient's defined classes, NaN where there is none.
        probabilities: classification: float64 (images, outputs); None for segmentation.
        targets: classification: long (images,), multilabel float (images, labels); None for segmentation.
    """

    patients: Sequence[str] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict)
    probabilities: Tensor | None = None
    targets: Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values: six decimals, null where undefined.

        Examples:
            >>> import torch
            >>> Cases(("a", "b"), {"dice": torch.tensor([0.5, torch.nan])}).to_dict()
            {'patients': ['a', 'b'], 'values': {'dice': [0.5, None]}}
            >>> Cases(("a",), {}, torch.tensor([[0.25, 0.75]]), torch.tensor([1])).to_dict()
            {'patients': ['a'], 'probabilities': [[0.25, 0.75]], 'targets': [1]}
        """
        if self.probabilities is None or self.targets is None:
            values = {metric: [None if value != value else round(value, 6) for value in of.tolist()] for metric, of in self.values.items()}
            return {"patients": list(self.patients), "values": values}
        probabilities = [[round(value, 6) for value in row] for row in self.probabilities.tolist()]
        return {"patients": list(self.patients), "probabilities": probabilities, "targets": self.targets.long().tolist()}
