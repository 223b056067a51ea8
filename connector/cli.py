"""The command ``kvferry``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
import zmq

from kvferry.connector.bench_command import bench
from kvferry.connector.plan_command import plan
from kvferry.transport.control.key_file import make_key_file
from kvferry.transport.errors import UsageError

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


@app.command()
def doctor(
    peer: Annotated[str, typer.Option(help="control port of a running engine, HOST:PORT")] = "",
    config: Annotated[str, typer.Option(help="kv_connector_extra_config of the engine, as JSON")] = "",
    share: Annotated[Path | None, typer.Option(help="write a report without secrets into this new file")] = None,
    self_test: Annotated[bool, typer.Option(help="hand a pattern over between two processes, over each plane")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Look whether this machine is fit for KVFerry. Exit status: 0 fit, 1 not fit, 2 wrong usage."""
    from kvferry.connector.doctor.command import doctor

    try:
        fit = doctor(peer=peer, config=config, share=share, self_test=self_test, as_json=as_json)
    except UsageError as error:
        _wrong_usage(str(error))
    raise typer.Exit(0 if fit else 1)


@app.command()
def top(
    engines: Annotated[list[str], typer.Argument(help="URLs of vLLM servers, http://HOST:PORT", metavar="URL...")],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="seconds between two polls")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="poll twice, print one table, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print rows as JSON, one line for each poll")] = False,
) -> None:
    """Show hand-overs, rates, failures and leases of running engines."""
    from kvferry.connector.top.command import top

    try:
        top(engines, interval=interval, once=once, as_json=as_json)
    except UsageError as error:
        _wrong_usage(str(error))


@app.command()
def drain(
    engine: Annotated[str, typer.Argument(help="URL of a vLLM server, http://HOST:PORT", metavar="URL")],
    quiet: Annotated[float, typer.Option(min=0, max=3600, help="seconds for which it must have had nothing")] = 5.0,
    timeout: Annotated[float, typer.Option(min=0, max=86400, help="seconds to wait at most")] = 300.0,
) -> None:
    """Wait until an engine has no request and holds no lease. Exit status: 0 it is idle, 1 it is not, 2 wrong usage.

    Before this command, have the router send nothing more to the engine; after it, end the engine by SIGTERM.
    """
    from kvferry.connector.top.drain import BusyError, wait_until_idle

    try:
        wait_until_idle(engine, quiet=quiet, timeout=timeout)
    except UsageError as error:
        _wrong_usage(str(error))
    except BusyError as error:
        typer.echo(f"kvferry: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{engine} is idle: no request and no lease for {quiet:g} s")


app.command()(bench)
app.command()(plan)


@app.command()
def router(
    prefill: Annotated[list[str] | None, typer.Option(help="URL of a P, or dns://NAME:PORT; may be repeated")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="URL of a D, or dns://NAME:PORT; may be repeated")] = None,
    engines_file: Annotated[Path | None, typer.Option(help="names engines, and is looked at every 3 s")] = None,
    host: Annotated[str, typer.Option(help="address to bind to")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to bind to")] = 9000,
    serial: Annotated[bool, typer.Option("--serial", help="ask D only when P has answered")] = False,
    relay: Annotated[bool, typer.Option("--relay/--no-relay", help="give the client P's token")] = True,
    connect_timeout: Annotated[float, typer.Option(help="seconds for a connection to an engine")] = 3.0,
    prefill_timeout: Annotated[float, typer.Option(help="seconds for P's answer, then decode only")] = 120.0,
    abandoned_prefill_timeout: Annotated[float, typer.Option(help="seconds for P's answer, client gone")] = 10.0,
    health_interval: Annotated[
        float, typer.Option(min=0.1, help="seconds between checks of an engine, and for one")
    ] = 5.0,
    max_requests: Annotated[int, typer.Option(min=1, help="requests in flight; more get 429")] = 4096,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB of one request; more gets 413")] = 64,
    admin_token_file: Annotated[Path | None, typer.Option(help="its token may change engines at run time")] = None,
    otlp_traces_endpoint: Annotated[str, typer.Option(help="URL to send spans of requests to (extra: otel)")] = "",
) -> None:
    """Serve OpenAI's API in front of prefill and decode engines (extra: router)."""
    try:
        from kvferry.router import command
    except ModuleNotFoundError as error:
        _wrong_usage(f"the router needs {error.name}: pip install 'kvferry[router]'")
    try:
        command.router(
            prefill or (), decode or (), engines_file, host=host, port=port, serial=serial, relay=relay,
            timeouts=(connect_timeout, prefill_timeout, abandoned_prefill_timeout), health_interval=health_interval,
            max_requests=max_requests, max_body_mib=max_body_mib, admin_token_file=admin_token_file,
            otlp_traces_endpoint=otlp_traces_endpoint,
        )  # fmt: skip
    except UsageError as error:
        _wrong_usage(str(error))


def _wrong_usage(text: str) -> NoReturn:
    typer.echo(f"kvferry: {text}", err=True)
    raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
