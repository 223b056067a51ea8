"""The command ``kvferry``. Each command imports its module when it runs: PyTorch alone takes a second to import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from kvferry.cli.terminal import FailedError, complain, failing, print_json
from kvferry.transport.control.key_file import make_key_file, read_key_file
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import KVFerryError, UsageError

# Options of ``bench`` and of ``plan``.
KvDtype = Annotated[str, typer.Option(help="--kv-cache-dtype of both engines")]
Tp = Annotated[int, typer.Option(min=1, help="tensor-parallel size")]
Pp = Annotated[int, typer.Option(min=1, help="pipeline-parallel size")]
BlockSize = Annotated[int, typer.Option(min=1, max=1 << 16, help="tokens of a block")]
Layout = Annotated[Literal["HND", "NHD"], typer.Option(help="order of heads and tokens in the pages")]
MODEL = "config.json of the model, its folder, or its name in the cache of Hugging Face"
Prompts = Annotated[list[int] | None, typer.Option(min=1, max=1 << 22, help="tokens of a prompt; may be repeated")]
OF_A_FLEET = (
    "from", "trace", "p-engines", "d-engines", "ttft", "tpot", "percentile", "step-ms", "step-ms-per-sequence",
    "d-sequences", "p-cache-tokens", "d-cache-tokens",
)  # fmt: skip
NO_FLEET = (
    "gone with all options of a fleet: give --prefill-tokens-per-second, and find the number of engines by "
    "`vllm bench serve`: docs/planning.md#how-many-engines"
)
NO_FORMS = "gone: both ranks have blocks of 16 tokens, NHD; other forms: benchmarks/planes/planes.py of the sources"
GONE = {
    "bench --calibration": "gone: benchmarks/plan/plan_fit.py of the sources writes one",
    "bench --plot": "gone: draw what --json writes",
    **dict.fromkeys((f"bench --{side}-{name}" for side in "pd" for name in ("block-size", "layout")), NO_FORMS),
    "plan --calibration": "gone: write the costs into cli/plan/calibration.json of the sources",
    "doctor --share": "gone: redirect what doctor prints, or --json, into a file; keys are not in it",
    **dict.fromkeys((f"plan --{name}" for name in OF_A_FLEET), NO_FLEET),
    "router --admin-token-file": "gone with changes by HTTP: name the engines in --engines-file, which may change at "
    "any time: docs/routers.md",
    "top": "gone: use `kvferry check`, the router's page, or Grafana: docs/observability.md",
}
"""What was in a release before, and what to do in its place."""
_USAGE: type[Any] = typer.BadParameter.__mro__[1]  # UsageError, of a module whose name differs by release


@contextmanager
def _in_one_line() -> Iterator[None]:
    """A mistake that Typer finds takes one line, too."""
    try:
        yield
    except _USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        command, said = error.ctx.info_name if error.ctx else "", error.format_message().replace("\n", " ")
        names = [f"{command} {getattr(error, 'option_name', '')}", *said.split("'")[1:2]]
        gone = next((f"{name} is {GONE[name]}" for name in names if name in GONE), "")
        complain(gone or f"{said.rstrip('.?')}; see `{error.ctx.command_path if error.ctx else 'kvferry'} --help`")
        raise typer.Exit(2) from None


class _Commands(TyperGroup):
    def make_context(self, *args: Any, **options: Any) -> Any:
        with _in_one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="KVFerry: KV caches from prefill engines (P) to decode engines (D).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables of rich cut off the names of options
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {metadata.version('kvferry')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """KVFerry: KV caches from prefill engines (P) to decode engines (D)."""


def _model_path(text: str) -> Path:
    with failing():
        if not text:  # a Path of it would be the working directory
            raise UsageError("--model is empty; name the config.json of a model, or its folder")
    return Path(text)


def _public_key(file: Path) -> str:
    with suppress(KVFerryError, OSError):
        keys = Keys(read_key_file(file))
        return f"its public key is {keys.public}, fingerprint {keys.fingerprint}"
    return "name another file"


@app.command()
@failing()
def keygen(
    file: Annotated[Path, typer.Argument(help="the file to write; it must not exist")] = Path("kvferry.key"),
) -> None:
    """Write a new secret key into FILE (mode 0600), and print its public key and fingerprint.

    Exit status: 0 it is written, 1 FILE exists already and was not changed, 2 FILE cannot be written.
    """
    if not file.name:
        raise UsageError("FILE is empty or a folder; name a file")
    try:
        secret = make_key_file(file)
    except FileExistsError:
        raise FailedError(f"{file} exists already, and nothing was changed; {_public_key(file)}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name a file in another directory") from None
    keys = Keys(secret)
    typer.echo(
        f"The secret key is in {file}. Its public key, and the fingerprint by which logs name it:\n\n"
        f"    {keys.public}  {keys.fingerprint}\n\n"
        f"One key for all engines: copy {file} to each host, and start each engine with\n"
        f"    KVFERRY_KEY_FILE={file.absolute()}\n"
        "One key for each engine: start each engine with its own file, and with the public keys of its peers in\n"
        "    KVFERRY_PEER_KEYS, separated by commas."
    )


@app.command()
@failing()
def doctor(
    peer: Annotated[str, typer.Option(help="control port of a running engine, HOST:PORT")] = "",
    model: Annotated[
        Path | None,
        typer.Option(help=f"with --peer: {MODEL}, to compare with the engine's", parser=_model_path, metavar="<path>"),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="JSON of --kv-transfer-config, or of its kv_connector_extra_config alone")
    ] = None,
    self_test: Annotated[bool, typer.Option(help="hand a pattern over between two processes, over each plane")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="for an init container: one line, no self-test")] = False,
) -> None:
    """Look whether this machine is fit for KVFerry. Exit status: 0 fit, 1 not fit, 2 wrong usage."""
    options = locals()
    from kvferry.cli.doctor.command import doctor

    raise typer.Exit(0 if doctor(**options) else 1)


@app.command()
@failing()
def drain(
    engine: Annotated[str, typer.Argument(help="URL of a vLLM server, http://HOST:PORT", metavar="URL")],
    quiet: Annotated[float, typer.Option(min=0, max=3600, help="seconds for which it must have had nothing")] = 5.0,
    timeout: Annotated[float, typer.Option(min=0, max=86400, help="seconds to wait at most")] = 300.0,
) -> None:
    """Wait until an engine has no request and holds no lease. Exit status: 0 it is idle, 1 it is not, 2 wrong usage.

    Before this command, have the router send nothing more to the engine; after it, end the engine by SIGTERM.
    """
    from kvferry.cli.drain import wait_until_idle

    wait_until_idle(engine, quiet=quiet, timeout=timeout, say=complain)
    typer.echo(f"{engine} is idle: no request and no lease for {quiet:g} s")


@app.command()
@failing()
def check(
    urls: Annotated[
        list[str], typer.Argument(help="URL of a kvferry router; or of a prefill and of a decode engine", metavar="URL")
    ],
    model: Annotated[str, typer.Option(help="the model to ask; unset: the first that a server names")] = "",
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="seconds for the whole check")] = 60.0,
    api_key: Annotated[str, typer.Option(help="key of the engines", envvar="VLLM_API_KEY")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Send a prompt, and say whether D loaded it from a P. Exit status: 0 it did, 1 it did not, 2 wrong usage.

    By way of a router, http://HOST:PORT; or to two engines themselves, P's URL first, as any router sends it.
    """
    from kvferry.cli.check import check

    result = check(urls, model=model, timeout=timeout, api_key=api_key)
    if as_json:
        print_json(result)
    else:
        typer.echo(result.said + (f"\n  {result.todo}" if result.todo else ""))
    raise typer.Exit(0 if result.handed_over else 1)


@app.command()
@failing()
def bench(
    model: Annotated[
        Path | None,
        typer.Option(help=f"{MODEL}; unset: Llama-3.1-8B", parser=_model_path, metavar="<path>"),
    ] = None,
    kv_dtype: KvDtype = "auto",
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel size: a rank has this part of the KV heads")] = 1,
    prompt: Prompts = None,
    plane: Annotated[
        list[str] | None, typer.Option(help="data plane; may be repeated; unset: all that the machine has")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="where the caches are; auto: on GPUs where there are any")
    ] = "auto",
    rounds: Annotated[int, typer.Option(min=3, max=1000, help="hand-overs of each cell")] = 11,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here as JSON")] = None,
) -> None:
    """Measure hand-overs between two ranks of this machine, over each data plane, on the caches of a model."""
    options = locals()
    from kvferry.cli.bench import bench

    raise typer.Exit(0 if bench(**options) else 1)


@app.command()
@failing()
def plan(
    model: Annotated[Path, typer.Option(help=MODEL, parser=_model_path, metavar="<path>")],
    prefill_tokens_per_second: Annotated[float, typer.Option(help="tokens that one P engine computes in a second")],
    p_tp: Tp = 1,
    d_tp: Tp = 1,
    p_pp: Pp = 1,
    d_pp: Pp = 1,
    p_block_size: BlockSize = 16,
    d_block_size: BlockSize = 16,
    p_layout: Layout = "NHD",
    d_layout: Layout = "NHD",
    kv_dtype: KvDtype = "auto",
    plane: Annotated[
        str | None,
        typer.Option(help="data plane and memory, as in nixl/gpu; unset: tcp/gpu with --link, cuda_ipc/gpu without"),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="rate of the link of one rank, as in 12.5GB/s, 100Gbps or 400G; unset: no bound")
    ] = None,
    prompt: Prompts = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the plan here as JSON")] = None,
) -> None:
    """Plan hand-overs of two deployments: who reads what from whom, messages, bytes, time."""
    options = locals()
    from kvferry.cli.plan.command import plan

    plan(**options)


@app.command()
@failing()
def router(
    prefill: Annotated[
        list[str] | None, typer.Option(help="URL of a prefill engine, or dns://NAME:PORT; may be repeated")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="URL of a decode engine, or dns://NAME:PORT; may be repeated")
    ] = None,
    engines_file: Annotated[Path | None, typer.Option(help="names engines, and is looked at every 3 s")] = None,
    host: Annotated[str, typer.Option(help="address to bind to")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to bind to")] = 9000,
    serial: Annotated[
        bool, typer.Option("--serial", help="ask the decode engine only when the prefill engine has answered")
    ] = False,
    always: Annotated[
        bool, typer.Option("--always/--choose", help="hand all prompts over, or those where it should pay")
    ] = True,
    prefix_reads: Annotated[
        bool, typer.Option("--prefix-reads", help="tell P which engine should have the beginning of a prompt")
    ] = False,
    connect_timeout: Annotated[float, typer.Option(help="seconds for a connection to an engine")] = 3.0,
    prefill_timeout: Annotated[float, typer.Option(help="seconds for P's answer, then decode only")] = 120.0,
    abandoned_prefill_timeout: Annotated[float, typer.Option(help="seconds for P's answer, client gone")] = 10.0,
    health_interval: Annotated[
        float, typer.Option(min=0.1, help="seconds between checks of an engine, and for one")
    ] = 3.0,
    max_requests: Annotated[int, typer.Option(min=1, help="requests in flight; more get 503")] = 4096,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB of one request; more gets 413")] = 64,
    otlp_traces_endpoint: Annotated[str, typer.Option(help="URL to send spans of requests to (extra: otel)")] = "",
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="debug: all lines")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="log one JSON object a line")] = False,
) -> None:
    """Serve the API of decode engines, with the prompts that prefill engines compute (extra: router)."""
    options = locals()
    from kvferry.router.command import router

    router(**options)


if __name__ == "__main__":
    app()
