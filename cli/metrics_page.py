"""Pages of servers over HTTP, and the samples of a page in Prometheus' text format."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvferry.router.engines import engine_url
from kvferry.router.http_client import said
from kvferry.transport.errors import UsageError, quoted

FETCH_SECONDS = 2.0
MAX_PAGE_BYTES = 32 << 20


class PageError(Exception):
    """A server gives no answer, or none that is of use; the message gives the reason in some words. ``status``: of its
    HTTP answer, 0 without one; ``body``: of that. ``gone``: nothing listens at its port."""

    def __init__(self, text: str, status: int = 0, body: bytes = b"", *, gone: bool = False) -> None:
        super().__init__(text)
        self.status, self.body, self.gone = status, body, gone


def server_url(text: str) -> str:
    """``http://HOST:PORT`` of a server whose host exists, from that, from ``HOST:PORT``, or from the URL of its
    ``/metrics`` or ``/v1``. Raises UsageError."""
    bare = re.sub(r"/(metrics|v1)?/?$", "", text)
    url = engine_url(bare if "://" in text or ":" not in text else f"http://{bare}")
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:  # a name server that is silent may answer later
            raise UsageError(f"{text}: {error.strerror}; expected http://HOST:PORT of a server") from None
    return url


def read(
    url: str, seconds: float, data: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[Mapping[str, str], bytes]:
    """The headers and the body of an answer with status 200; a POST where there are ``data``. No redirection is
    followed: it would get the key, whatever host it names. Raises PageError: no such answer came in time."""

    async def ask() -> tuple[int, str, Mapping[str, str], bytes]:
        method, limit = "GET" if data is None else "POST", aiohttp.ClientTimeout(total=seconds)
        body = bytearray()
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.request(method, url, data=data, headers=headers, allow_redirects=False) as answer,
        ):
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > MAX_PAGE_BYTES:
                    raise PageError(f"its page has more than {MAX_PAGE_BYTES >> 20} MiB")
            return answer.status, answer.reason or "", answer.headers, bytes(body)

    try:
        status, reason, answered, body = asyncio.run(ask())
    except TimeoutError:
        raise PageError(f"no answer within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        gone = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
        raise PageError(ascii(said(error))[1:-1], gone=gone) from None  # no escapes for a terminal
    if status != 200:
        raise PageError(f"HTTP {status} {ascii(reason)[1:-1][:80]}", status, body)
    return answered, body


def fetch_samples(url: str, seconds: float = FETCH_SECONDS) -> list[Sample]:
    """The samples of the metrics of a server. Raises PageError: they did not come, or the page is none."""
    page = read(f"{url}/metrics", seconds)[1].decode("utf-8", "replace")
    try:
        return [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except Exception as error:  # the parser raises many kinds
        raise PageError(f"no metrics page: {quoted(str(error))}") from None
