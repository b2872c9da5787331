"""A federation's root key under a passphrase: whoever has the key can let anybody in, so it is not
left in the clear.

The file is encrypted with Fernet (AES and HMAC) under a key that scrypt makes of the passphrase.
"""

import base64
import json
import os
import secrets
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from medflare.core.errors import ConfigError
from medflare.core.files import write_atomically
from medflare.core.text import read_json

OPEN = "cert.json"  # FLARE's name for the file
LOCKED = "cert.json.locked"
PASSPHRASE_VARIABLE = "MEDFLARE_ROOT_PASSPHRASE"
SHORTEST = 12  # characters of a passphrase
_COST = {"n": 2**16, "r": 8, "p": 1}  # 64 MiB and a fraction of a second for every guess
# Raised for half a JSON file, or another one.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


def check_passphrase(passphrase: str) -> None:
    """Raise ConfigError for a passphrase that is too short."""
    if len(passphrase) < SHORTEST:
        raise ConfigError(
            f"the passphrase of the root key has fewer than {SHORTEST} characters; "
            f"set {PASSPHRASE_VARIABLE} to a longer one"
        )


def lock(state: Path, passphrase: str) -> None:
    """Write the encrypted file beside the open one, then overwrite and remove the open one.

    Raises:
        ConfigError: the open file is damaged, as by an interrupted run; nothing was changed.
    """
    file = state / OPEN
    content = file.read_bytes()
    _root_key(file, content)
    salt = secrets.token_bytes(16)
    token = _cipher(passphrase, salt).encrypt(content)
    locked = {
        "format": "medflare root key 1",
        "salt": base64.b64encode(salt).decode(),
        "token": token.decode(),
    }
    write_atomically(state / LOCKED, json.dumps(locked).encode())
    with file.open("r+b") as old:  # a disk with snapshots may keep it all the same
        old.write(bytes(len(content)))
        old.flush()
        os.fsync(old.fileno())
    file.unlink()


def unlock(state: Path, passphrase: str) -> None:
    """Write the open file beside the encrypted one, which stays.

    An open file of an interrupted run is newer, and stays.

    Raises:
        ConfigError: a wrong passphrase, a damaged file, or an open file with another root key;
            nothing was changed.
    """
    file = state / LOCKED
    opened = state / OPEN
    try:
        locked = read_json(file)
        cipher = _cipher(passphrase, base64.b64decode(locked["salt"]))
        content = cipher.decrypt(locked["token"].encode())
    except InvalidToken:
        raise ConfigError(
            f"{file}: wrong passphrase, or a damaged file; correct {PASSPHRASE_VARIABLE}, "
            "or restore the file"
        ) from None
    except _DAMAGED as error:
        raise ConfigError(f"{file}: damaged; restore it from a backup") from error
    if not opened.exists():
        write_atomically(opened, content)
    elif _root_key(opened, opened.read_bytes()) != _root_key(file, content):
        raise ConfigError(
            f"{opened} and {file.name} hold different root keys; "
            "move away the one that no startup kit in use comes from"
        )


def _root_key(file: Path, content: bytes) -> str:
    try:
        return str(json.loads(content)["root_pri_key"])
    except _DAMAGED as error:
        raise ConfigError(f"{file}: damaged; restore it from a backup") from error


def _cipher(passphrase: str, salt: bytes) -> Fernet:
    key = Scrypt(salt=salt, length=32, **_COST).derive(passphrase.encode())
    return Fernet(base64.urlsafe_b64encode(key))
