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
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # what half a JSON file, or another one, comes to


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("lock", "unlock"):
        sys.exit("usage: root_key.py lock|unlock WORKSPACE")
    passphrase = os.environ.get(VARIABLE, "")
    if len(passphrase) < 12:
        sys.exit(f"{VARIABLE} must hold a passphrase of at least 12 characters")
    workspace = Path(sys.argv[2])
    if sys.argv[1] == "lock":
        if not workspace.is_dir():
            sys.exit(f"{workspace}: no such folder; name the workspace of nvflare provision")
        if problems := [said for file in sorted(workspace.glob(f"*/state/{OPEN}")) if (said := lock(file, passphrase))]:
            sys.exit("\n".join(problems))
    else:
        unlock(sorted(workspace.glob(f"*/state/{LOCKED}")), passphrase)


def lock(file: Path, passphrase: str) -> str:
    """The encrypted file beside the open one, then the open one overwritten and removed; gives what kept it from that, or ""."""
    try:
        _lock(file, passphrase)
    except OSError as error:
        return f"{file}: the root key still lies open there, it cannot be locked ({error.strerror or error}); mend that and lock it"
    except _DAMAGE:
        return f"{file}: damaged, nothing was locked; move it away, and take your backup of {LOCKED}"
    return ""


def _lock(file: Path, passphrase: str) -> None:
    salt, opened = secrets.token_bytes(16), file.read_bytes()
    _root_key(opened)  # what an interrupted run left half written must not replace a whole one
    token = _cipher(passphrase, salt).encrypt(opened)
    content = {"format": "medflare root key 1", "salt": base64.b64encode(salt).decode(), "token": token.decode()}
    _write(file.with_name(LOCKED), json.dumps(content).encode())
    size = file.stat().st_size
    with file.open("r+b") as old:  # a disk with snapshots may keep it all the same
        old.write(bytes(size))
        old.flush()
        os.fsync(old.fileno())
    file.unlink()


def unlock(files: list[Path], passphrase: str) -> None:
    """The open file beside every encrypted one, which stays; of several all or none."""
    opened = {file.with_name(OPEN): _decrypted(file, passphrase) for file in files}
    for file, found in opened.items():
        try:
            other = file.exists() and _root_key(file.read_bytes()) != _root_key(found)
        except _DAMAGE:
            sys.exit(f"{file}: damaged; move it away, the locked one beside it is whole")
        if other:
            sys.exit(f"{file}: another root key than the locked one beside it; move away that which the kits in use do not come from")
    missing = [file for file in opened if not file.exists()]  # one that an interrupted run left is the newer one
    try:
        for file in missing:
            _write(file, opened[file])
    except OSError as error:
        for file in missing:
            file.unlink(missing_ok=True)
        sys.exit(f"{file}: cannot be written ({error.strerror or error}); nothing was unlocked")


def _decrypted(file: Path, passphrase: str) -> bytes:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return _cipher(passphrase, base64.b64decode(content["salt"])).decrypt(content["token"].encode())
    except InvalidToken:
        sys.exit(f"{file}: wrong passphrase, or a damaged file; nothing was changed")
    except OSError as error:
        sys.exit(f"{file}: cannot be read ({error.strerror}); run it as the account that locked it")
    except _DAMAGE:
        sys.exit(f"{file}: damaged; take your backup of it; nothing was changed")


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
