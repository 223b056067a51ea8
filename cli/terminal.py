"""How commands print, and how they fail: ``kvferry: `` and one line on stderr."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.table import Table

from kvferry.transport.errors import KVFerryError


class FailedError(Exception):
    """A command could do its work, and the answer is no; the message has one line."""


def complain(text: object) -> None:
    typer.echo(f"kvferry: {text}", err=True)


@contextmanager
def failing() -> Iterator[None]:
    """Ends a command with exit status 2 where its input is not usable, and with 1 where the answer is no."""
    try:
        yield
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
