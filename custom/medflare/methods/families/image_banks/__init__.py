"""Image banks: before the first round every site describes its training images; the sites change
their images by the bank of these descriptions.
"""

from functools import partial

from medflare.methods import Method

_row = partial(Method, server=f"{__name__}.bank:BankServer", family="image banks")

FEDRDN = _row(
    "fedrdn",
    "Images normalised by the channel statistics of a random site",
    "Yan et al., FedRDN, arXiv 2306.09363",
    f"{__name__}.styles:FedRDNSite",
    models={"channel_normalised": f"{__name__}.styles:channel_normalised_model"},
    stays="channel statistics",
)
CCST = _row(
    "ccst",
    "Images in the styles of other sites, without the published VGG network",
    "Chen et al., CCST, WACV 2023",
    f"{__name__}.styles:CCSTSite",
)
ELCFS = _row(
    "elcfs",
    "Episodes with exchanged low-frequency amplitudes, without the boundary loss",
    "Liu et al., FedDG, CVPR 2021",
    f"{__name__}.spectra:ELCFSSite",
)
HARMOFL = _row(
    "harmofl",
    "Normalised amplitudes and perturbed weights",
    "Jiang et al., HarmoFL, AAAI 2022",
    f"{__name__}.spectra:HarmoFLSite",
    models={"amplitude_normalised": f"{__name__}.spectra:amplitude_normalised_model"},
)
