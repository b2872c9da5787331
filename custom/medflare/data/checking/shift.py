"""How much sites' images differ from each other, as one figure."""

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from medflare.core.rng import numpy_generator
from medflare.data.splits import SiteData, middle_slice

_THUMBNAIL = 12  # pixels a side of what the figure looks at
_MOST_IMAGES = 300  # per site: enough for two digits


def site_shift(data: Mapping[str, SiteData]) -> tuple[float | None, str]:
    """How far sites' images differ: balanced accuracy of telling the site from a 12 x 12 thumbnail.

    Linear discriminant analysis with shrinkage on what the network sees (of a volume its middle slice), three-fold cross-validation by
    patient. 1 / sites means that nothing tells them apart.

    Args:
        data: site -> its splits.

    Returns:
        The figure and "", or None and the reason.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    pictures, sites, patients = [], [], []
    for name, site in data.items():
        images = [(split, row) for split in (site.train, site.validation, site.test) for row in range(len(split))]
        owners = np.array([f"{name}/{patient}" for split in (site.train, site.validation, site.test) for patient in split.patients])
        if len(set(owners)) < 3:
            return None, f"site {name} has fewer than three patients"
        rows = numpy_generator(0, name, "shift").permutation(len(images))[:_MOST_IMAGES]
        chosen = (images[row][0].image(images[row][1]) for row in rows)
        small = [functional.interpolate(middle_slice(image)[None], (_THUMBNAIL, _THUMBNAIL), mode="area") for image in chosen]
        pictures.append(torch.cat(small).flatten(1).numpy())
        sites += [name] * len(rows)
        patients += owners[rows].tolist()
    folds = StratifiedGroupKFold(3, shuffle=True, random_state=0)
    told = cross_val_predict(
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), np.concatenate(pictures), sites, groups=patients, cv=folds
    )
    return float(balanced_accuracy_score(sites, told)), ""
