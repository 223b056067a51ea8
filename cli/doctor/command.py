"""The command ``kvferry doctor``: its options, and what it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kvferry.cli.doctor.findings import DoctorSection, is_fit, lines, verdict
from kvferry.cli.doctor.peer import parse_address
from kvferry.cli.doctor.run import DoctorOptions, sections
from kvferry.cli.doctor.share import report, scrubber_of_this_host, write
from kvferry.transport.errors import UsageError


def doctor(*, peer: str, config: str, share: Path | None, self_test: bool, as_json: bool) -> bool:
    """Print what was found, section by section, or all of it as JSON.

    Returns:
        Whether the machine is fit.

    Raises:
        UsageError: an option is not usable. Nothing was looked at, but for a file that could not be written at the end.
    """
    try:
        address = parse_address(peer) if peer else None
    except UsageError as error:
        raise UsageError(f"--peer: {error}") from None
    options = DoctorOptions(parse_config(config), address, self_test)
    if share is not None:
        _check_new(share)
    console = Console(highlight=False, soft_wrap=True)
    found: list[DoctorSection] = []
    for section in sections(options):
        found.append(section)
        if not as_json:
            for line in lines(section):
                console.print(line)
    if as_json:
        content = {"fit": is_fit(found), "sections": msgspec.to_builtins(found)}
        print(json.dumps(content, indent=1))
    else:
        console.print(verdict(found))
    if share is not None:
        environ = options.machine.environ
        try:
            write(share, report(found, environ, scrubber_of_this_host(environ)))
        except OSError as error:
            raise UsageError(f"--share: {share} cannot be written: {error.strerror}") from None
        if not as_json:
            console.print(f"The report is in {share}. Read it before you send it.")
    return is_fit(found)


def _check_new(path: Path) -> None:
    """Check that a file can be new. Raises UsageError."""
    try:
        why = (
            "exists already"
            if os.path.lexists(path)
            else ""
            if path.absolute().parent.is_dir()
            else "is in no directory"
        )
    except (OSError, ValueError) as error:
        why = f"is no path: {error}"
    if why:
        raise UsageError(f"--share: {path} {why}; name a new file")


def parse_config(text: str) -> dict[str, Any]:
    """``--config``: ``kv_connector_extra_config``, or the whole ``--kv-transfer-config`` that contains it.

    Raises:
        UsageError: it is no JSON object; one line.
    """
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: no JSON: {error}") from None
    if isinstance(config, dict) and "kv_connector" in config:
        config = config.get("kv_connector_extra_config", {})
    if not isinstance(config, dict):
        raise UsageError(f"--config: {type(config).__name__}, expected a JSON object such as " + '{"plane": "tcp"}')
    return config
