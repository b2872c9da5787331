"""Image banks: before the first round every site describes its training images; the sites change
their images by the bank of these descriptions.
"""

from medflare.methods.method import Method


def _bank(
    name: str, title: str, paper: str, site: str, kind: str = "", builder: str = "", stays: str = ""
) -> Method:
    """A row: a site algorithm of this package, "module:Class", and the builder of its kind of
    model, "module:function", if it has one.
    """
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=f"{__name__}.{site}",
        server=f"{__name__}.bank:BankServer",
        models={kind: f"{__name__}.{builder}"} if kind else {},
        family="image banks",
        stays=stays,
    )


FEDRDN = _bank(
    "fedrdn",
    "Images normalised by the channel statistics of a random site",
    "Yan et al., FedRDN, arXiv 2306.09363",
    "styles:FedRDNSite",
    "channel_normalised",
    "styles:channel_normalised_model",
    stays="channel statistics",
)
CCST = _bank(
    "ccst",
    "Images in the styles of other sites, without the published VGG network",
    "Chen et al., CCST, WACV 2023",
    "styles:CCSTSite",
)
ELCFS = _bank(
    "elcfs",
    "Episodes with exchanged low-frequency amplitudes, without the boundary loss",
    "Liu et al., FedDG, CVPR 2021",
    "spectra:ELCFSSite",
)
HARMOFL = _bank(
    "harmofl",
    "Normalised amplitudes and perturbed weights",
    "Jiang et al., HarmoFL, AAAI 2022",
    "spectra:HarmoFLSite",
    "amplitude_normalised",
    "spectra:amplitude_normalised_model",
)
