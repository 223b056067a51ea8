"""Settings, the key, and the control port. A setting that is not usable is one finding, and a key is never shown."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.cli.doctor.findings import Finding, fault, note, ok, warning
from kvferry.cli.doctor.machine import Machine
from kvferry.connector.config import ENVIRONMENT, Settings, load_settings
from kvferry.transport.allowed_peers import is_loopback
from kvferry.transport.control.key_file import default_key_file, read_key_file
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import ConfigError, did_you_mean, shortened

PREFIX = "KVFERRY_"
SECRET = "secret_key"


def read_settings(machine: Machine, config: Mapping[str, Any]) -> tuple[list[Finding], Settings | None]:
    """The settings of an engine with this environment and this ``kv_connector_extra_config``.

    Returns:
        Findings, one for each value that is not usable; and the settings, ``None`` where there is such a value.
    """
    given = {variable: machine.environ[variable] for variable in machine.environ if variable.startswith(PREFIX)}
    found = [_unknown(variable) for variable in sorted(given) if variable not in ENVIRONMENT.values()]
    faults = [_refused({}, {variable: text}) for variable, text in sorted(given.items())]
    faults += [_refused({name: value}, {}) for name, value in config.items()]
    bad = [finding for finding in faults if finding is not None]
    try:
        settings = load_settings(config, machine.environ)
    except ConfigError:
        together = _refused(config, machine.environ)
        assert together is not None
        return [*found, *(bad or [together])], None
    if bad:  # not usable by itself, and covered by a value of the other source
        return [*found, *bad], None
    changed = [
        f"{field}={'set' if field == SECRET else getattr(settings, field)}"
        for field in Settings.__struct_fields__
        if getattr(settings, field) != getattr(Settings(), field)
    ]
    return [*found, ok("settings", ", ".join(changed) or "all have their defaults")], settings


def _unknown(variable: str) -> Finding:
    known = sorted(ENVIRONMENT.values())
    hint = did_you_mean(variable, known)
    return warning(
        variable, f"no setting has this variable{hint}", "remove it, or correct its name", expected=", ".join(known)
    )


def _refused(config: Mapping[str, Any], environ: Mapping[str, str]) -> Finding | None:
    try:
        load_settings(config, environ)
    except ConfigError as error:
        what, _, why = str(error).partition(": ")
        return fault(what, why, "correct it; docs/settings.md lists all settings")
    return None


# --- the key --------------------------------------------------------------------------------------------------------


def read_keys(settings: Settings) -> tuple[list[Finding], Keys | None]:
    """The keys that an engine with these settings has. Unlike an engine, it makes no key.

    Returns:
        Findings; and the keys, ``None`` where there are none, or none yet.
    """
    try:
        if settings.secret_key is not None:
            keys, source = Keys(settings.secret_key, settings.peer_keys), "from secret_key (KVFERRY_SECRET_KEY)"
        elif settings.key_file is not None:
            path = Path(settings.key_file)
            keys, source = Keys(read_key_file(path), settings.peer_keys), f"in {path}, which only this user can read"
        else:
            path = default_key_file()
            if not path.exists():
                return [note("key", f"none yet: the first engine of this user makes {path}")], None
            keys, source = Keys(read_key_file(path), settings.peer_keys), f"in {path}, which only this user can read"
    except FileNotFoundError:
        make = f"copy the file of the other hosts there, or make the first: kvferry keygen {settings.key_file}"
        return [fault("key", f"{settings.key_file} does not exist", make)], None
    except ConfigError as error:
        what, _, why = str(error).partition(": ")
        return [fault(what, why, "correct it; docs/settings.md has a section about keys")], None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        return [fault("key", f"its file cannot be looked at: {error}", "name another file in key_file")], None
    found = [ok("key", f"{keys.fingerprint}, {source}")]
    if len(keys.admitted) > 1:
        found.append(ok("peer_keys", f"{len(keys.admitted) - 1} more"))
    if settings.key_file is None and settings.secret_key is None and not is_loopback(settings.side_channel_host):
        found.append(
            warning(
                "key", "is of this user on this host only, and the control port is for other hosts",
                "make one key for all hosts, `kvferry keygen`, and set KVFERRY_KEY_FILE on each of them",
            )
        )  # fmt: skip
    return found, keys


# --- the control port -----------------------------------------------------------------------------------------------


def control_port(settings: Settings) -> list[Finding]:
    """Whether rank 0 can listen on its control port. The port is bound for a moment."""
    host, port = settings.side_channel_host, settings.side_channel_port
    where, what = f"{host}:{port}" if port else f"a port of {host}", "control port"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (socket.gaierror, UnicodeError) as error:
        name = "name an address of this machine in side_channel_host (KVFERRY_SIDE_CHANNEL_HOST)"
        why = getattr(error, "strerror", None) or "it is no name"
        return [fault(what, f"{shortened(host, 80)} cannot be resolved: {why}", name)]
    except OSError as error:
        return [_no_port(what, where, error)]
    if is_loopback(host):
        reach = "peers on other hosts do not reach it; for those set KVFERRY_SIDE_CHANNEL_HOST"
        return [note(what, f"{where} is free; loopback", reach)]
    return [ok(what, f"{where} is free")]


def _no_port(what: str, where: str, error: OSError) -> Finding:
    match error.errno:
        case errno.EADDRINUSE:
            return warning(
                what, f"{where} is in use",
                "nothing to do if an engine of this machine runs there; else set another KVFERRY_SIDE_CHANNEL_PORT",
            )  # fmt: skip
        case errno.EADDRNOTAVAIL:
            return fault(
                what, f"{where} is no address of this machine", "set KVFERRY_SIDE_CHANNEL_HOST to one that it has"
            )
        case errno.EACCES:
            return fault(what, f"{where} is for root only", "set KVFERRY_SIDE_CHANNEL_PORT to one from 1024 on")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return fault(what, f"{where} cannot be bound: {reason}", "set another KVFERRY_SIDE_CHANNEL_HOST or ..._PORT")
