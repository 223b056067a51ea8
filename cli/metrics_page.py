"""Pages of servers over HTTP, and the samples of a page in Prometheus' text format."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException

from kvferry.transport.errors import ProtocolError, UsageError, quoted, quoted_url

FETCH_SECONDS = 2.0
MAX_PAGE_BYTES = 32 << 20
_PAGE_BYTES = 1 << 16
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: the name of its series, its labels, and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The samples of a page in Prometheus' text format:
    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. Raises ProtocolError: a line is
    neither a comment nor a sample; one line."""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError
            yield Sample(match[1], _labels(match[2] or ""), float(match[3]))
        except ValueError:
            raise ProtocolError(f"line {number} is no sample of Prometheus: {line[:80]!r}") from None


def _labels(text: str) -> dict[str, str]:
    found, position = {}, 0
    while position < len(text.rstrip()):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError
        found[match[1]] = _ESCAPED.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], match[2])
        position = match.end()
    return found


class EngineDownError(Exception):
    """A server gives no answer, or none that is of use; the message gives the reason in some words. ``status``: of its
    HTTP answer, 0 without one; ``body``: of that. ``gone``: nothing listens at its port."""

    def __init__(self, text: str, status: int = 0, body: bytes = b"", *, gone: bool = False) -> None:
        super().__init__(text)
        self.status, self.body, self.gone = status, body, gone


def metrics_url(text: str) -> str:
    """The URL of an engine's ``/metrics`` page, from ``http://HOST:PORT``, ``HOST:PORT`` or the URL itself. Raises
    UsageError: it is of another form; one line."""
    full = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(full)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and ("://" in text or parts.port is not None)
    except ValueError:
        usable = False
    if not usable or "@" in text or any(character.isspace() or not character.isprintable() for character in text):
        raise UsageError(
            f"{quoted_url(text)} is no URL of a server; expected http://HOST:PORT, such as http://127.0.0.1:8001"
        )
    path = parts.path.rstrip("/")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path or "/metrics", "", ""))


def check_host(url: str, page: str) -> None:
    """Raises UsageError: the host's name does not exist. A name server that does not answer may do so later."""
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(page).hostname, None)
    except (socket.gaierror, UnicodeError) as error:
        if not isinstance(error, socket.gaierror) or error.errno != socket.EAI_AGAIN:
            why = getattr(error, "strerror", None) or "it is no name of a host"
            raise UsageError(f"{url}: {why}; expected http://HOST:PORT of a server") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection would get the request's key, whatever host it names."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def read(request: urllib.request.Request | str, seconds: float) -> tuple[dict[str, str], bytes]:
    """The headers, in small letters, and the body of an answer with status 200. No proxy is used, and no redirection
    is followed. Raises EngineDownError: no answer came within about ``seconds``, or another one."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    end = time.monotonic() + seconds
    try:
        with opener.open(request, timeout=seconds) as answer:
            page = bytearray()
            while more := answer.read1(_PAGE_BYTES):
                page += more
                if len(page) > MAX_PAGE_BYTES:
                    raise EngineDownError(f"its page has more than {MAX_PAGE_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise EngineDownError(f"no end of its page within {seconds:g} s")
            return {name.lower(): text for name, text in answer.headers.items()}, bytes(page)
    except urllib.error.HTTPError as error:
        body = b""
        with error, suppress(OSError, HTTPException):
            body = error.read(_PAGE_BYTES)
        said = ascii(str(error.reason))[1:-1][:80]  # no escapes for a terminal
        raise EngineDownError(f"HTTP {error.code} {said}", error.code, body) from None
    except (OSError, HTTPException) as error:  # URLError and TimeoutError are OSErrors
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise EngineDownError(f"no answer within {seconds:g} s") from None
        text = str(getattr(reason, "strerror", None) or reason) or type(error).__name__
        if not isinstance(reason, OSError):
            text = f"it does not answer in HTTP: {quoted(text)}"
        raise EngineDownError(text, gone=isinstance(reason, ConnectionRefusedError)) from None


def fetch_samples(url: str, seconds: float = FETCH_SECONDS) -> list[Sample]:
    """The samples of one page of metrics. Raises EngineDownError: it did not come, or it is none."""
    try:
        return list(samples(read(url, seconds)[1].decode("utf-8", "replace")))
    except ProtocolError as error:
        raise EngineDownError(f"no metrics page: {error}") from None
