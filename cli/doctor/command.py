"""The command ``kvferry doctor``: its options, its sections in order, and what it prints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry.cli.doctor import host, peer, planes, rdma, settings
from kvferry.cli.doctor.findings import DoctorSection, Finding, Machine, is_fit, lines, verdict, warning
from kvferry.cli.doctor.share import report, scrubber_of_this_host
from kvferry.cli.terminal import parsed_json, print_json
from kvferry.transport.errors import UsageError


def doctor(*, peer: str, config: str, share: Path | None, self_test: bool, as_json: bool) -> bool:
    """Print what was found, section by section, or all of it as JSON. Returns whether the machine is fit.

    Raises UsageError: an option is not usable. Nothing was looked at, but for a file that could not be written at the
    end.
    """
    address, chosen, machine = _address(peer), parse_config(config), Machine()
    if share is not None:
        _check_new(share)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)
    found: list[DoctorSection] = []
    for section in sections(machine, chosen, address, self_test):
        found.append(section)
        for line in lines(section):
            console.print(line)
    console.print(verdict(found))
    if as_json:
        print_json({"fit": is_fit(found), "sections": found}, indent=1)
    if share is not None:
        try:
            with share.open("x") as file:  # a file is never replaced
                file.write(report(found, machine.environ, scrubber_of_this_host(machine.environ)))
        except OSError as error:
            raise UsageError(f"--share: {share} cannot be written: {error.strerror}") from None
        console.print(f"The report is in {share}. Read it before you send it.")
    return is_fit(found)


# --- options --------------------------------------------------------------------------------------------------------


def _address(text: str) -> tuple[str, int] | None:
    try:
        return peer.parse_address(text) if text else None
    except UsageError as error:
        raise UsageError(f"--peer: {error}") from None


def _check_new(path: Path) -> None:
    """Raises UsageError: the file cannot be new."""
    try:
        why = "exists already" if os.path.lexists(path) else ""
        why = why or ("" if path.absolute().parent.is_dir() else "is in no directory")
    except (OSError, ValueError) as error:
        why = f"is no path: {error}"
    if why:
        raise UsageError(f"--share: {path} {why}; name a new file")


def parse_config(text: str) -> dict[str, Any]:
    """``--config``: ``kv_connector_extra_config``, or the whole ``--kv-transfer-config`` that contains it. Raises
    UsageError: it is no JSON object; one line."""
    try:
        config = parsed_json(text or "{}")
    except ValueError as error:
        raise UsageError(f"--config: no JSON: {error}") from None
    if isinstance(config, dict) and "kv_connector" in config:
        config = config.get("kv_connector_extra_config", {})
    if not isinstance(config, dict):
        raise UsageError(f"--config: {type(config).__name__}, expected a JSON object such as " + '{"plane": "tcp"}')
    return config


# --- sections -------------------------------------------------------------------------------------------------------


def sections(
    machine: Machine, config: Mapping[str, Any], address: tuple[str, int] | None = None, self_test: bool = True
) -> Iterator[DoctorSection]:
    """Look at this machine, one section after the other. ``config``: ``kv_connector_extra_config``. ``address``: of an
    engine's control port."""
    yield section("Versions", host.version_findings(machine))
    chosen, usable = settings.Chosen(), list[planes.PlaneOnDevice]()
    yield section("Settings, key and port", settings.findings(machine, config, chosen))
    yield section("Limits", host.limit_findings(machine))
    yield section("GPUs", host.gpu_findings(machine))

    def data_planes() -> Iterator[Finding]:
        yield from planes.findings(machine, chosen.settings, usable)
        yield from rdma.findings(machine)
        yield from planes.lacking_planes(usable)

    yield section("Data planes", data_planes())
    if address is not None:
        found = peer.findings(*address, chosen.settings, chosen.keys)
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
        remedy = "report it with the file of `kvferry doctor --share`"
        found.append(warning("this section", f"failed: {reason}", remedy))
    return DoctorSection(title, found)
