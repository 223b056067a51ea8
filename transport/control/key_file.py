"""The key file: the secret key that the engines of one user on one host share without any setting."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from kvferry.transport.control.keys import new_secret, raw_key
from kvferry.transport.errors import ConfigError

FILE_NAME = "kvferry.key"
_KEY_CHARACTERS = 64
_MOST_LINKS = 40  # as Linux


def default_key_file() -> Path:
    """The key file of this user on this host. Makes its directory where this host has no runtime directory of the user.

    Raises:
        ConfigError: another user made that directory, or may write into it.
    """
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    for place in (named, f"/run/user/{os.geteuid()}"):
        if os.path.isabs(place) and is_private(Path(place)):
            return Path(place) / FILE_NAME
    own = Path(tempfile.gettempdir()) / f"kvferry-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    if not is_private(own):
        raise ConfigError(
            f"key_file: {own} is not a directory that only user {os.geteuid()} may write; remove it, or set key_file"
        )
    return own / FILE_NAME


def is_private(directory: Path) -> bool:
    """Whether only this user may add files there."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def read_key_file(path: Path) -> str:
    """The secret key in a key file.

    The file belongs to this user or to root, and nobody else may read it: but a group of this process where the file is
    root's, as in a Kubernetes Secret with ``fsGroup``. The links that lead to it belong to one of these two as well.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is not such a file, or it contains no key; one line.
    """
    try:
        _check_links(path)
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"key_file: {path} cannot be used: {error.strerror}; expected a regular file of this user"
        ) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"key_file: {path} is no regular file; name one that `kvferry keygen` made")
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"key_file: {path} belongs to user {found.st_uid}; expected {os.geteuid()}, who runs this engine, or "
                "root"
            )
        by_group = 0o040 if found.st_uid == 0 and found.st_gid in (os.getegid(), *os.getgroups()) else 0
        if found.st_mode & 0o077 & ~by_group:
            raise ConfigError(
                f"key_file: {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may read it; expected 0600, "
                "in a Kubernetes Secret defaultMode 0400. Others may have read it: make a new key with `kvferry keygen`"
            )
        content = os.read(fd, _KEY_CHARACTERS + 2)
    finally:
        os.close(fd)
    text = content.removesuffix(b"\n").decode("ascii", "replace")
    try:
        raw_key("key_file", text)
    except ConfigError:
        raise ConfigError(
            f"key_file: {path} contains no key ({found.st_size} bytes, expected one line of {_KEY_CHARACTERS} "
            "hexadecimal digits); remove it, or make another with `kvferry keygen`"
        ) from None
    return text


def _check_links(path: Path) -> None:
    """Raises ConfigError: another user has made a symbolic link that leads to the file, and so chooses the key."""
    for _ in range(_MOST_LINKS):
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode):
            return
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"key_file: {path} is a symbolic link of user {found.st_uid}; expected {os.geteuid()}, who runs this "
                "engine, or root"
            )
        path = path.parent / path.readlink()


def make_key_file(path: Path) -> str:
    """Write a new secret key, which is returned, into a new file of mode 0600. No reader sees a part of it.

    Raises:
        FileExistsError: the file exists already; it is unchanged.
        OSError: the file cannot be written.
    """
    secret = new_secret()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(f"{secret}\n".encode())
            file.flush()
            os.fsync(fd)
        os.link(draft, path)  # unlike a rename, a link replaces nothing
    finally:
        draft.unlink()
    return secret


def shared_key() -> str:
    """The secret key of all engines of this user on this host; the first engine makes it.

    Raises:
        ConfigError: the key file cannot be used, or cannot be made; one line.
    """
    path = default_key_file()
    try:
        with contextlib.suppress(FileNotFoundError):
            return read_key_file(path)
        with contextlib.suppress(FileExistsError):  # another engine was faster
            return make_key_file(path)
        return read_key_file(path)
    except OSError as error:
        raise ConfigError(f"key_file: {path} cannot be made: {error.strerror}; name another in key_file") from None
