"""Methods that train nothing: they query the sites."""

from medflare.methods import Method

EVALUATE = Method(
    name="evaluate",
    title="A final model on the test images of every site, without training",
    paper="none; the tests are those of every method's final models",
    site="medflare.methods.surveys.evaluate:EvaluateSite",
    server="medflare.methods.surveys.evaluate:EvaluateServer",
    trains=False,
    roles=("global", "deployed"),
)
FINGERPRINT = Method(
    name="fingerprint",
    title="Fingerprints of the sites' training images, without training",
    paper="for planning by Isensee et al., nnU-Net, Nature Methods 18, 2021",
    site="medflare.methods.surveys.fingerprint:FingerprintSite",
    server="medflare.methods.surveys.fingerprint:FingerprintServer",
    trains=False,
    roles=(),
)
