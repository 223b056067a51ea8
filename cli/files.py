"""The files that commands read and write."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from kvferry.transport.errors import ConfigError

MAX_FILE = 1 << 30


def read_file(path: Path) -> bytes:
    """Raises ConfigError: the file cannot be read, or is larger than ``MAX_FILE``."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"{path} has more than {MAX_FILE >> 20} MiB; give a smaller file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name another file") from None


def read_model_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a model, or of the model in this folder. Raises ConfigError."""
    path = path / "config.json" if path.is_dir() else path
    content = read_file(path)
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; give the config.json of a model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has no JSON object; give the config.json of a model")
    return config


def check_writable(*paths: Path | None) -> None:
    """Raises ConfigError: ``write_file`` would fail after the work."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            why = errno.EISDIR
        elif not path.parent.is_dir():
            why = errno.ENOENT
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = errno.EACCES
        else:
            continue
        raise _unwritable(path, os.strerror(why))


def write_file(path: Path, content: bytes) -> None:
    """Raises ConfigError: the file cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None


def _unwritable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {why}; name a file in another directory")
