"""The command ``kvferry doctor``: its options, its sections in order, and what it prints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from kvferry.cli.doctor import flag, host, settings
from kvferry.cli.doctor.findings import (
    DoctorSection,
    Finding,
    Machine,
    in_one_line,
    is_fit,
    lines,
    note,
    verdict,
    warning,
)
from kvferry.cli.terminal import complain, parsed_json, print_json, read_model_config
from kvferry.transport.errors import UsageError


def doctor(*, peer: str, model: Path | None, config: str | None, self_test: bool, as_json: bool, gate: bool) -> bool:
    """Print what was found, section by section, or all of it as JSON, or one line for a ``gate``. Returns whether the
    machine is fit.

    Raises UsageError, ConfigError: an option is not usable. Nothing was looked at.
    """
    address, chosen, machine = parse_address(peer) if peer else None, parse_config(config), Machine()
    if model is not None and address is None:
        raise UsageError("--model is compared with that of an engine: give --peer HOST:PORT, too")
    content = None if model is None else read_model_config(model)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json or gate)
    found: list[DoctorSection] = []
    for section in sections(machine, chosen, address, content, self_test=self_test and not gate):
        found.append(section)
        for line in lines(section):
            console.print(line)
    fit = is_fit(found)
    console.print(verdict(found))
    if as_json:
        print_json({"fit": fit, "sections": found}, indent=1)
    elif gate:
        complain(in_one_line(found))
    return fit


# --- options --------------------------------------------------------------------------------------------------------


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``. Raises UsageError; one line."""
    with suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port and parts.netloc == text and "@" not in text:
            return parts.hostname, parts.port
    raise UsageError(f"--peer: {text!r} is no control port; expected HOST:PORT with a port from 1 to 65535")


def parse_config(text: str | None) -> dict[str, Any] | None:
    """``--config``: ``--kv-transfer-config``, or its ``kv_connector_extra_config`` alone; ``None`` where it is not
    given. Raises UsageError: it is no JSON object; one line."""
    if text is None:
        return None
    if not text.strip():
        raise UsageError(f"--config is empty; expected the JSON of --kv-transfer-config: {flag.EXAMPLE}")
    try:
        config = parsed_json(text)
    except ValueError as error:
        raise UsageError(f"--config: no JSON: {error}; give the JSON itself, not a file: {flag.EXAMPLE}") from None
    if not isinstance(config, dict):
        raise UsageError(f"--config: {type(config).__name__}, expected a JSON object: {flag.EXAMPLE}")
    return config


# --- sections -------------------------------------------------------------------------------------------------------


def sections(
    machine: Machine, config: Mapping[str, Any] | None, address: tuple[str, int] | None,
    model: Mapping[str, Any] | None, *, self_test: bool,
) -> Iterator[DoctorSection]:  # fmt: skip
    """Look at this machine, one section after the other. ``config``: as ``parse_config`` returns it. ``address``: of an
    engine's control port. ``model``: ``config.json`` of this machine's."""
    yield section("Versions", host.version_findings(machine))
    chosen = settings.Chosen()

    def chosen_settings() -> Iterator[Finding]:
        found, extra = ([], config or {}) if config is None or not flag.is_flag(config) else flag.judge(config)
        yield from found
        yield from settings.findings(machine, extra, chosen)

    yield section("Settings, key and port", chosen_settings())
    yield section("Limits", host.limit_findings(machine))
    try:
        from kvferry.cli.doctor import gpus, peer, planes, rdma
    except Exception as error:  # PyTorch does not import, for whatever reason
        why = f"they need PyTorch: {type(error).__name__}: {error}"
        yield section("GPUs, data planes, engine and self-test", [note("not looked at", why)])
        return
    yield section("GPUs", gpus.gpu_findings(machine))
    usable: list[planes.PlaneOnDevice] = []

    def data_planes() -> Iterator[Finding]:
        yield from planes.findings(machine, chosen.settings, usable)
        yield from planes.lacking_planes(usable)
        yield from rdma.findings(machine)

    yield section("Data planes", data_planes())
    if address is not None:
        found = peer.findings(*address, chosen.settings, chosen.keys, model)
        yield section(f"Engine at {address[0]}:{address[1]}", found)
    if self_test:
        tested = planes.self_test(chosen.settings.side_channel_host, usable)
        yield section("Self-test: 64 MiB from one process to another", tested)


def section(title: str, look: Iterable[Finding]) -> DoctorSection:
    """What ``look`` finds. An error of the section itself is a finding too: the others still help."""
    found: list[Finding] = []
    try:
        found.extend(look)
    except Exception as error:  # an odd machine must not hide what the other sections find
        reason = f"{type(error).__name__}: {str(error).partition(os.linesep)[0]}"
        remedy = "report it with what `kvferry doctor` prints"
        found.append(warning("this section", f"failed: {reason}", remedy))
    return DoctorSection(title, found)
