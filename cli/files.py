"""The files that commands read and write, and the JSON that they are given."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec

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


def parsed_json(text: str | bytes) -> Any:
    """Raises ValueError: it is no JSON; the message has one line."""
    try:
        return json.loads(text)
    except RecursionError as error:  # brackets without end
        raise ValueError(str(error)) from None


def read_model_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a model, or of the model in this folder. Raises ConfigError."""
    path = path / "config.json" if path.is_dir() else path
    content = read_file(path)
    try:
        config = parsed_json(content)
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}; give the config.json of a model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has no JSON object; give the config.json of a model")
    return config


def check_writable(*paths: Path | None) -> None:
    """Raises ConfigError: ``write_file`` would fail after the work."""
    for path in filter(None, paths):
        if path.is_dir():
            why = errno.EISDIR
        elif not path.parent.is_dir():
            why = errno.ENOENT
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = errno.EACCES
        else:
            continue
        raise _unwritable(path, os.strerror(why))


def write_file(path: Path | None, content: bytes) -> None:
    """Raises ConfigError: the file cannot be written. Without a path nothing is written."""
    try:
        if path is not None:
            path.write_bytes(content)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None


def write_json(path: Path | None, content: Any) -> None:
    """As ``write_file``."""
    write_file(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def _unwritable(path: Path | None, why: str | None) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {why}; name a file in another directory")
