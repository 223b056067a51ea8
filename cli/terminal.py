"""How commands print, read and write files, and fail: ``kvferry: `` and one line on stderr."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.table import Table

from kvferry.transport.errors import ConfigError, KVFerryError

MAX_FILE = 1 << 30


class FailedError(Exception):
    """A command could do its work, and the answer is no; the message has one line."""


def complain(text: object) -> None:
    typer.echo(f"kvferry: {text}", err=True)


@contextmanager
def failing() -> Iterator[None]:
    """Ends a command with exit status 2 where its input or installation is not usable, and 1 where the answer is no."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = "engine" if error.name in ("numpy", "torch", "triton") else "router"
        complain(f"this command needs {error.name}: pip install 'kvferry[{extra}]'")
        raise typer.Exit(2) from None
    except (KVFerryError, FailedError) as error:
        complain(error)
        raise typer.Exit(1 if isinstance(error, FailedError) else 2) from None


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> Table:
    """A table whose columns are aligned to the right, but for ``left``."""
    drawn = Table(title=title)
    for name in columns:
        drawn.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def print_json(content: Any, indent: int | None = None) -> None:
    print(json.dumps(msgspec.to_builtins(content), indent=indent), flush=True)


def parsed_json(text: str | bytes) -> Any:
    """Raises ValueError: it is no JSON; the message has one line."""
    try:
        return json.loads(text)
    except RecursionError as error:  # brackets without end
        raise ValueError(str(error)) from None


def read_file(path: Path) -> bytes:
    """Raises ConfigError: the file cannot be read, or is larger than ``MAX_FILE``."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"{path} has more than {MAX_FILE >> 20} MiB; give a smaller file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name another file") from None


def read_model_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a model: ``path``, in this folder, or of this name in the cache of Hugging Face. Raises
    ConfigError."""
    path = path / "config.json" if os.path.isdir(path) else path
    path = path if os.path.exists(path) else _cached_config(str(path))
    try:
        config = parsed_json(read_file(path))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}; give the config.json of a model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has no JSON object; give the config.json of a model")
    return config


def _cached_config(name: str) -> Path:
    with suppress(ImportError, ValueError):  # ValueError: no name that a model can have
        from huggingface_hub import try_to_load_from_cache

        if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
            return Path(found)
    raise ConfigError(
        f"{name} is no file and no folder, nor a model in the cache of Hugging Face; give the config.json of a model, "
        "or its folder"
    )


def check_writable(path: Path | None) -> None:
    """Raises ConfigError: ``write_json`` would fail after the work."""
    if path is not None:
        found = errno.ENOENT if not path.parent.is_dir() else errno.EISDIR if path.is_dir() else 0
        if found or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _unwritable(path, os.strerror(found or errno.EACCES))


def write_json(path: Path | None, content: Any) -> None:
    """Raises ConfigError: the file cannot be written. Without a path nothing is written."""
    try:
        if path is not None:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    except OSError as error:
        raise _unwritable(path, error.strerror) from None


def _unwritable(path: Path | None, why: str | None) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {why}; name a file in another directory")
