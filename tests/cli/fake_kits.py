"""Startup kits as FLARE 2.9 provisions them, as far as the commands of a kit look at them."""

import json
import socket
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from medflare.cli.startup_kit import Kit, open_kit

Kind = Literal["site", "server"]
JOB = "0b6f4a2e-8a0d-4a51-9d1b-3f0c2f5e7a11"
PLAIN = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
NOW = datetime.now(timezone.utc)


class Root:
    """A federation's root, which signs the certificates of its kits."""

    def __init__(self, name: str = "medflare") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self.signed(self.name, self.key, days=(-1, 3650), is_root=True)

    def signed(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        days: tuple[float, float],
        is_root: bool = False,
    ) -> bytes:
        """A certificate that is valid from so many days to so many days from now, in PEM."""
        begin, end = (NOW + timedelta(days=day) for day in days)
        builder = x509.CertificateBuilder(
            self.name, name, key.public_key(), x509.random_serial_number(), begin, end
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=is_root, path_length=None), critical=True
        )
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(own, critical=False)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def make_kit(
    folder: Path,
    root: Root,
    kind: Kind = "site",
    port: int = 1,
    days: tuple[float, float] = (-1, 365),
) -> Kit:
    """A freshly provisioned kit: certificates, FLARE's own files, no policies of medflare's."""
    name, part = ("localhost", "server") if kind == "server" else (folder.name, "client")
    startup = folder / "startup"
    local = folder / "local"
    for place in (startup, local):
        place.mkdir(mode=0o700, parents=True)
    key = ec.generate_private_key(ec.SECP256R1())
    pem = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (startup / f"{part}.key").write_bytes(key.private_bytes(*pem))
    (startup / f"{part}.key").chmod(0o600)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    (startup / f"{part}.crt").write_bytes(root.signed(subject, key, days))
    (startup / "rootCA.pem").write_bytes(root.certificate)
    files = {
        "ssl_private_key": f"{part}.key",
        "ssl_cert": f"{part}.crt",
        "ssl_root_cert": "rootCA.pem",
    }
    server = {"name": "medflare", "service": {"target": f"localhost:{port}", "scheme": "http"}}
    content: dict[str, Any] = {"servers": [server], "client": {**files, "fqsn": name}}
    if kind == "server":
        content = {"servers": [{**server, **files}]}
    (startup / f"fed_{part}.json").write_text(json.dumps(content))
    (local / "resources.json.default").write_text(json.dumps(_resources(kind)))
    return open_kit(folder)


def _resources(kind: Kind) -> dict[str, object]:
    content: dict[str, object] = {
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": ["nvflare.app_common.np.NPTrainer"],
    }
    if kind == "site":
        return {**content, "components": [{"id": "process_launcher", "path": PLAIN, "args": {}}]}
    manager = {
        "id": "job_manager",
        "path": "manager",
        "args": {"uri_root": "/tmp/nvflare/jobs-storage"},
    }
    snapshots = {"args": {"storage": {"args": {"root_dir": "/tmp/nvflare/snapshot-storage"}}}}
    return {
        **content,
        "servers": [{"heart_beat_timeout": 600}],
        "snapshot_persistor": snapshots,
        "components": [manager],
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
