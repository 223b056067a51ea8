"""The command ``kvferry doctor``: its options, its sections in order, and what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kvferry.cli.doctor import host, peer, planes, rdma, settings
from kvferry.cli.doctor.findings import DoctorSection, Finding, Level, Machine, is_fit, lines, note, verdict, warning
from kvferry.cli.doctor.share import report, scrubber_of_this_host, write
from kvferry.cli.files import parsed_json
from kvferry.cli.terminal import print_json
from kvferry.connector.config import Settings
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import UsageError


def doctor(*, peer: str, config: str, share: Path | None, self_test: bool, as_json: bool) -> bool:
    """Print what was found, section by section, or all of it as JSON. Returns whether the machine is fit.

    Raises UsageError: an option is not usable. Nothing was looked at, but for a file that could not be written at the
    end.
    """
    address, chosen, machine = _address(peer), parse_config(config), Machine()
    if share is not None:
        _check_new(share)
    console = Console(highlight=False, soft_wrap=True)
    found: list[DoctorSection] = []
    for section in sections(machine, chosen, address, self_test):
        found.append(section)
        for line in () if as_json else lines(section):
            console.print(line)
    if as_json:
        print_json({"fit": is_fit(found), "sections": found}, indent=1)
    else:
        console.print(verdict(found))
    if share is not None:
        try:
            write(share, report(found, machine.environ, scrubber_of_this_host(machine.environ)))
        except OSError as error:
            raise UsageError(f"--share: {share} cannot be written: {error.strerror}") from None
        if not as_json:
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
    yield DoctorSection("Versions", guarded(lambda: host.version_findings(machine)))
    found, keys, chosen = _settings(machine, config)
    yield DoctorSection("Settings, key and port", found)
    yield DoctorSection("Limits", guarded(lambda: host.limit_findings(machine)))
    yield DoctorSection("GPUs", guarded(lambda: host.gpu_findings(machine)))
    usable: list[planes.PlaneOnDevice] = []

    def data_planes() -> list[Finding]:
        there, had = planes.findings(machine, chosen)
        usable.extend(had)
        return [*there, *rdma.findings(machine), *planes.lacking_planes(usable)]

    yield DoctorSection("Data planes", guarded(data_planes))
    if address is not None:
        title = f"Engine at {address[0]}:{address[1]}"
        yield DoctorSection(title, guarded(lambda: peer.findings(*address, chosen, keys)))
    if self_test:
        tested = guarded(lambda: list(planes.self_test(chosen.side_channel_host, usable)))
        yield DoctorSection("Self-test: 64 MiB from one process to another", tested)


def _settings(machine: Machine, config: Mapping[str, Any]) -> tuple[list[Finding], Keys | None, Settings]:
    """Findings; the keys; and the settings, or their defaults where one is not usable."""
    found, chosen = settings.read_settings(machine, config)
    if chosen is None:
        return [*found, note("settings", "the next sections use the defaults")], None, Settings()
    keys: Keys | None = None

    def key() -> list[Finding]:
        nonlocal keys
        key_findings, keys = settings.read_keys(chosen)
        return key_findings

    found += guarded(key)
    port = guarded(lambda: [settings.control_port(chosen)])
    if any(finding.level is Level.FAULT for finding in port):  # the planes have not the same fault again
        return [*found, *port], keys, msgspec.structs.replace(chosen, side_channel_host=Settings().side_channel_host)
    return [*found, *port], keys, chosen


def guarded(look: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a section. An error of the section itself is a finding too: the others still help."""
    try:
        return look()
    except Exception as error:  # an odd machine must not hide what the other sections find
        reason = f"{type(error).__name__}: {str(error).partition(os.linesep)[0]}"
        return [warning("this section", f"failed: {reason}", "report it with the file of `kvferry doctor --share`")]
