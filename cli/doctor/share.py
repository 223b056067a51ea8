"""``--share FILE``: all findings in one file for a bug report, without secrets.

The file has what the sections found, and a few environment variables. Then every text is cleaned: values of variables
that look secret, keys, tokens, home directories, names of hosts and users, and addresses are replaced.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.cli.doctor.findings import DoctorSection, is_fit
from kvferry.connector.config import ENVIRONMENT

FORMAT = 1
"""Version of the file's form."""
PREFIXES = ("KVFERRY_", "UCX_", "NCCL_", "CUDA_", "PYTORCH_", "RAPIDS_", "VLLM_", "ZMQ_")
"""Variables of the environment that go into the file."""
_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASS|CREDENTIAL|AUTH|COOKIE|DSN", re.IGNORECASE)
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40,}")
_NOT_IN_PATHS = "^!*?&<>()[]{}%$#"
_BLOB = re.compile(r"\b(?:[0-9a-fA-F]{24,}|[A-Za-z0-9+/_-]{32,}={0,2})")
_ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w.])")
_HOME = re.compile(r"/(?:home|Users)/[^/\s'\":,;]+|/root(?=[/\s'\":,;]|$)")
_LEAST_SECRET = 4
"""Shorter values of secret variables are not looked for in other texts: they would blot out common words."""


class Scrubber:
    """Replaces in texts what a report must not have. The same value gets the same replacement, so that a reader sees
    which are equal."""

    def __init__(self, environ: Mapping[str, str], *, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        words: dict[str, str] = {}
        for name, value in environ.items():
            if _SECRET_NAME.search(name):
                words |= {part: "<secret>" for part in (value, *value.split(",")) if len(part) >= _LEAST_SECRET}
        home = environ.get("HOME", "")
        if len(home) > 1:
            words[home.rstrip("/")] = "~"
        self._words = dict(sorted(words.items(), key=lambda item: -len(item[0])))  # a longer one may contain another
        names = {part: "<host>" for host in hosts for part in (host, host.partition(".")[0])}
        names |= {user: "<user>" for user in users}
        longest = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        whole = [re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])") for name in longest]
        self._names = [(pattern, names[name]) for pattern, name in zip(whole, longest, strict=True)]
        self._addresses: dict[str, str] = {}

    def text(self, text: str) -> str:
        """A text without secrets."""
        # First, because a part of a key may look like another secret, and the rest would stay.
        text = " ".join(_KEY.sub("<key>", word) if _is_key(word) else word for word in text.split(" "))
        for word, instead in self._words.items():
            text = text.replace(word, instead)
        text = _HOME.sub("~", text)
        text = _ADDRESS.sub(self._address, text)
        text = _BLOB.sub(_blob, text)
        for name, instead in self._names:
            text = name.sub(instead, text)
        return text

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return self._addresses.setdefault(str(address), f"<address {len(self._addresses) + 1}>")

    def everywhere(self, value: Any) -> Any:
        """All texts of a structure of dictionaries and lists, names in dictionaries too."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {self.text(str(name)): self.everywhere(each) for name, each in value.items()}
            case Sequence():
                return [self.everywhere(each) for each in value]
        return value


def _is_key(word: str) -> bool:
    """Whether a word contains a Z85 key: a run of at least 40 characters of its alphabet that is neither a path nor a
    URL. All but 2 of 10,000 keys have one of ``_NOT_IN_PATHS``, which tells them from these."""
    found = _KEY.search(word)
    if found is None:
        return False
    run, kinds = found[0], (str.isdigit, str.islower, str.isupper)
    is_place = run.startswith(("/", "./")) or "://" in run
    mixed = all(any(kind(character) for character in run) for kind in kinds)
    return any(character in _NOT_IN_PATHS for character in run) or (mixed and not is_place)


def _blob(match: re.Match[str]) -> str:
    """A long run of characters without a digit is a name."""
    return "<token>" if any(character.isdigit() for character in match[0]) else match[0]


def scrubber_of_this_host(environ: Mapping[str, str]) -> Scrubber:
    """A scrubber that knows the names of this host and of its user."""
    try:
        users = [getpass.getuser()]
    except (KeyError, OSError):  # no such user in the password file
        users = []
    hosts = {socket.gethostname(), platform.node(), environ.get("HOSTNAME", "")}
    return Scrubber(environ, hosts=sorted(hosts), users=[user for user in users if user != "root"])


def report(sections: Sequence[DoctorSection], environ: Mapping[str, str], scrubber: Scrubber) -> str:
    """The content of the file: JSON."""
    shown = {
        name: "set" if _SECRET_NAME.search(name) else value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and (not name.startswith("KVFERRY_") or name in ENVIRONMENT.values())
    }
    content = {
        "format": FORMAT, "fit": is_fit(sections),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)), "environment": shown, "sections": msgspec.to_builtins(sections),
    }  # fmt: skip
    return json.dumps(scrubber.everywhere(content), indent=1) + "\n"
