"""The federation's root key under a passphrase: whoever has the key can let anybody in, so it does not lie about in the clear.

    python root_key.py unlock WORKSPACE        before provisioning: cert.json from cert.json.locked, where there is one
    python root_key.py lock WORKSPACE          after it: cert.json.locked in place of cert.json

WORKSPACE is that of `nvflare provision`; the passphrase stands in MEDFLARE_ROOT_PASSPHRASE. The file is encrypted with Fernet (AES and
HMAC) under a key that scrypt makes of the passphrase.
"""

import base64
import json
import os
import secrets
import sys
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

OPEN, LOCKED = "cert.json", "cert.json.locked"
VARIABLE = "MEDFLARE_ROOT_PASSPHRASE"
_COST = {"n": 2**16, "r": 8, "p": 1}  # 64 MiB and a fraction of a second for every guess


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("lock", "unlock"):
        sys.exit("usage: root_key.py lock|unlock WORKSPACE")
    passphrase, workspace = os.environ.get(VARIABLE, ""), Path(sys.argv[2])
    if len(passphrase) < 12:
        sys.exit(f"{VARIABLE} must hold a passphrase of at least 12 characters")
    if sys.argv[1] == "lock" and not workspace.is_dir():
        sys.exit(f"{workspace}: no such folder; name the workspace of nvflare provision")
    pattern, act = (OPEN, lock) if sys.argv[1] == "lock" else (LOCKED, unlock)
    problems = []
    for file in sorted(workspace.glob(f"*/state/{pattern}")):
        try:
            act(file, passphrase)
        except InvalidToken:
            problems.append(f"{file}: wrong passphrase, or a damaged file; nothing was changed")
        except OSError as error:
            problems.append(f"{file}: cannot be {sys.argv[1]}ed ({error.strerror or error}); nothing was changed")
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # what half a JSON file, or another one, comes to
            problems.append(f"{file}: {error if isinstance(error, AnotherKey) else 'damaged; take your backup of it'}; nothing was changed")
    if problems:
        sys.exit("\n".join(problems))


class AnotherKey(ValueError):
    """Two root keys must not be mixed: kits of one never join those of the other."""


def lock(file: Path, passphrase: str) -> None:
    """Write the encrypted file beside the open one, then overwrite and remove the open one."""
    salt, opened = secrets.token_bytes(16), file.read_bytes()
    _root_key(opened)  # raises if an interrupted run has cut the open file short
    token = _cipher(passphrase, salt).encrypt(opened)
    content = {"format": "medflare root key 1", "salt": base64.b64encode(salt).decode(), "token": token.decode()}
    _write(file.with_name(LOCKED), json.dumps(content).encode())
    size = file.stat().st_size
    with file.open("r+b") as old:  # a disk with snapshots may keep it all the same
        old.write(bytes(size))
        old.flush()
        os.fsync(old.fileno())
    file.unlink()


def unlock(file: Path, passphrase: str) -> None:
    """Write the open file beside the encrypted one, which stays; an open one that an interrupted run left is the newer one and stays."""
    content = json.loads(file.read_text(encoding="utf-8"))
    found = _cipher(passphrase, base64.b64decode(content["salt"])).decrypt(content["token"].encode())
    place = file.with_name(OPEN)
    if not place.exists():
        _write(place, found)
    elif _root_key(place.read_bytes()) != _root_key(found):
        raise AnotherKey(f"{OPEN} beside it holds another root key; move away that which the kits in use do not come from")


def _root_key(content: bytes) -> str:
    return str(json.loads(content)["root_pri_key"])


def _cipher(passphrase: str, salt: bytes) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(Scrypt(salt=salt, length=32, **_COST).derive(passphrase.encode())))


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}")
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    main()
