"""All sections of ``kvferry doctor``, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.cli.doctor import gpus, limits, peer, planes, rdma, settings, versions
from kvferry.cli.doctor.findings import DoctorSection, Finding, Level, note, warning
from kvferry.cli.doctor.machine import Machine
from kvferry.cli.doctor.self_test import SelfTest
from kvferry.connector.config import Settings
from kvferry.transport.control.keys import Keys


@dataclass(frozen=True)
class DoctorOptions:
    """What the user asks for. ``config``: ``kv_connector_extra_config``. ``peer``: host and port of an engine."""

    config: Mapping[str, Any] = field(default_factory=dict)
    peer: tuple[str, int] | None = None
    self_test: bool = True
    machine: Machine = field(default_factory=Machine)


def sections(options: DoctorOptions) -> Iterator[DoctorSection]:
    """Look at this machine, one section after the other."""
    machine = options.machine
    yield DoctorSection("Versions", guarded(lambda: versions.findings(machine)))
    found, keys, chosen = _settings(options)
    yield DoctorSection("Settings, key and port", found)
    yield DoctorSection("Limits", guarded(lambda: limits.findings(machine)))
    yield DoctorSection("GPUs", guarded(lambda: gpus.findings(machine)))
    usable: list[planes.PlaneOnDevice] = []

    def data_planes() -> list[Finding]:
        there, had = planes.findings(machine, chosen)
        usable.extend(had)
        return [*there, *rdma.findings(machine), *planes.lacking_planes(usable)]

    yield DoctorSection("Data planes", guarded(data_planes))
    if options.peer is not None:
        host, port = options.peer
        yield DoctorSection(f"Engine at {host}:{port}", guarded(lambda: peer.findings(host, port, chosen, keys)))
    if options.self_test:
        test = SelfTest(chosen.side_channel_host)
        yield DoctorSection("Self-test: 64 MiB from one process to another", guarded(lambda: list(test.run(usable))))


def _settings(options: DoctorOptions) -> tuple[list[Finding], Keys | None, Settings]:
    """Findings; the keys; and the settings, or their defaults where one is not usable."""
    found, chosen = settings.read_settings(options.machine, options.config)
    if chosen is None:
        left = note("settings", "the next sections use the defaults")
        return [*found, left], None, Settings()
    usable = chosen
    held: list[Keys | None] = []

    def key() -> list[Finding]:
        key_findings, keys = settings.read_keys(usable)
        held.append(keys)
        return key_findings

    key_findings = guarded(key)
    port_findings = guarded(lambda: settings.control_port(usable))
    if any(finding.level is Level.FAULT for finding in port_findings):  # the planes have not the same fault again
        chosen = msgspec.structs.replace(chosen, side_channel_host=Settings().side_channel_host)
    return [*found, *key_findings, *port_findings], held[0] if held else None, chosen


def guarded(look: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a section. An error of the section itself is a finding too: the others still help."""
    try:
        return look()
    except Exception as error:  # an odd machine must not hide what the other sections find
        reason = f"{type(error).__name__}: {str(error).partition(os.linesep)[0]}"
        return [warning("this section", f"failed: {reason}", "report it with the file of `kvferry doctor --share`")]
