"""Says whether a startup kit's certificate is valid by this machine's clock; FLARE itself may wait in silence where it is not.

    python check_clock.py KIT

Called by start.sh.
"""

import sys
from datetime import datetime, timezone
from pathlib import Path

from cryptography import x509


def main(kit: Path) -> None:
    for file in sorted((kit / "startup").glob("*.crt")):
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        begin, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(timezone.utc)
        if not begin <= now <= end:
            remedy = "set the clock" if now < begin else "set the clock, or have a new kit provisioned if it is right"
            valid = f"is valid from {begin:%F %R} to {end:%F %R} UTC"
            sys.exit(f"{kit.name}: {file.name} {valid}, and the clock here says {now:%F %R}; {remedy}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_clock.py KIT")
    main(Path(sys.argv[1]))
