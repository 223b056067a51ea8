"""Settings, the key, and the control port. A setting that is not usable is one finding, and a key is never shown."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvferry.cli.doctor.findings import Finding, Level, Machine, fault, note, ok, warning
from kvferry.connector.config import ENVIRONMENT, Settings, load_settings, unknown_variables
from kvferry.transport.control.key_file import default_key_file, read_key_file
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.listener import listening_socket
from kvferry.transport.errors import ConfigError, shortened
from kvferry.transport.host import is_loopback


@dataclass
class Chosen:
    """The settings of an engine of this machine, or their defaults where one is not usable, and its keys, ``None``
    where there are none."""

    settings: Settings = field(default_factory=Settings)
    keys: Keys | None = None


def findings(machine: Machine, config: Mapping[str, Any], chosen: Chosen) -> Iterator[Finding]:
    """``chosen``: gets the settings and the keys."""
    found, settings = read_settings(machine, config)
    yield from found
    if settings is None:
        yield note("settings", "the next sections use the defaults")
        return
    chosen.settings = settings
    found, chosen.keys = read_keys(settings)
    yield from found
    port = control_port(settings)
    yield port
    if port.level is Level.FAULT:  # the planes have not the same fault again
        chosen.settings = msgspec.structs.replace(settings, side_channel_host=Settings().side_channel_host)


def read_settings(machine: Machine, config: Mapping[str, Any]) -> tuple[list[Finding], Settings | None]:
    """The settings of an engine with this environment and this ``kv_connector_extra_config``, ``None`` where a value is
    not usable: the first one is a finding."""
    found = [
        warning(name, *_what_to_do(why, f"remove it, or correct its name: {', '.join(sorted(ENVIRONMENT.values()))}"))
        for name, why in unknown_variables(machine.environ).items()
    ]
    try:
        settings, defaults = load_settings(config, machine.environ), Settings()
    except ConfigError as error:
        what, _, why = str(error).partition(": ")
        return [*found, fault(what, *_what_to_do(why, "correct it; docs/settings.md lists all settings"))], None
    changed = [
        f"{name}={getattr(settings, name)}"
        for name in Settings.__struct_fields__
        if getattr(settings, name) != getattr(defaults, name)
    ]
    return [*found, ok("settings", ", ".join(changed) or "all have their defaults")], settings


def _what_to_do(why: str, otherwise: str) -> tuple[str, str]:
    """What is wrong, and what to do: of a setting that is gone, what takes its place."""
    name, gone, instead = why.partition(" is gone; ")
    return (f"{name} is gone", f"remove it; {instead}") if gone else (why, otherwise)


def read_keys(settings: Settings) -> tuple[list[Finding], Keys | None]:
    """The keys that an engine with these settings has, ``None`` where there are none, or none yet: unlike an engine, it
    makes no key."""
    try:
        path = default_key_file() if settings.key_file is None else Path(settings.key_file)
        if settings.key_file is None and not path.exists():
            return [note("key", f"none yet: the first engine of this user makes {path}")], None
        keys = Keys(read_key_file(path), settings.peer_keys)
    except FileNotFoundError:
        make = f"copy the file of the other hosts there, or make the first: kvferry keygen {settings.key_file}"
        return [fault("key", f"{settings.key_file} does not exist", make)], None
    except ConfigError as error:
        what, _, why = str(error).partition(": ")
        return [fault(what, why, "correct it; docs/settings.md has a section about keys")], None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        return [fault("key", f"its file cannot be looked at: {error}", "name another file in key_file")], None
    found = [ok("key", f"{keys.fingerprint}, in {path}, which only this user can read")]
    if len(keys.admitted) > 1:
        found.append(ok("peer_keys", f"{len(keys.admitted) - 1} more"))
    if settings.key_file is None and not is_loopback(settings.side_channel_host):
        value = "is of this user on this host only, and the control port is for other hosts"
        make = "make one key for all hosts, `kvferry keygen`, and set KVFERRY_KEY_FILE on each of them"
        found.append(warning("key", value, make))
    return found, keys


def control_port(settings: Settings) -> Finding:
    """Whether rank 0 can listen on its control port. The port is bound for a moment."""
    host, port, what = settings.side_channel_host, settings.side_channel_port, "control port"
    where = f"{shortened(host, 80)}:{port}" if port else f"a port of {shortened(host, 80)}"
    try:
        listening_socket(host, port).close()
    except ConfigError as error:
        why, _, do = str(error).partition(": ")[2].partition("; ")
        if error.__context__ is not None and getattr(error.__context__, "errno", 0) == errno.EADDRINUSE:
            return warning(what, why, f"nothing to do if an engine of this machine runs there; else {do}")
        return fault(what, shortened(why), do or "set another KVFERRY_SIDE_CHANNEL_HOST")
    if is_loopback(host):
        reach = "peers on other hosts do not reach it; for those set KVFERRY_SIDE_CHANNEL_HOST"
        return note(what, f"{where} is free; loopback", reach)
    return ok(what, f"{where} is free")
