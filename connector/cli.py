"""The command ``kvferry``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import zmq

from kvferry.connector.plan_command import plan
from kvferry.transport.control.key_file import make_key_file

app = typer.Typer(
    help="KVFerry: KV caches from prefill engines to decode engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """KVFerry: KV caches from prefill engines to decode engines."""


@app.command()
def keygen(
    file: Annotated[Path, typer.Argument(help="the file to write; it must not exist")] = Path("kvferry.key"),
) -> None:
    """Write a new secret key into FILE (mode 0600), and print its public key."""
    try:
        secret = make_key_file(file)
    except FileExistsError:
        typer.echo(f"kvferry: {file} exists already, and nothing was changed; name another file", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"kvferry: {file} cannot be written: {error.strerror}; name a file in another directory", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"The secret key is in {file}. Its public key:")
    typer.echo(f"\n    {zmq.curve_public(secret.encode()).decode()}\n")
    typer.echo(
        f"One key for all engines: copy {file} to each host, and start each engine with\n"
        f"    KVFERRY_KEY_FILE={file.absolute()}\n"
        "One key for each engine: start each engine with its own file, and with the public keys of its peers in\n"
        "    KVFERRY_PEER_KEYS, separated by commas."
    )


app.command()(plan)


if __name__ == "__main__":
    app()
