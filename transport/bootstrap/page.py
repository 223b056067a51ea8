"""The bootstrap page: how routers that know P by one HTTP address find the addresses of its ranks. Pure.

``GET /query`` answers as the bootstrap server of vLLM's Mooncake connector does: for each data-parallel rank the engine
id, and for each tensor- and pipeline-parallel rank an address. Here an address is that of the rank's control port. The
page has no secrets: connections to a control port are admitted by key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.transport.errors import ProtocolError, quoted, quoted_url

PATH = "/query"

Ranks = Mapping[tuple[int, int], tuple[str, int]]
"""Host and control port by (tp_rank, pp_rank)."""


class _Entry(msgspec.Struct):
    engine_id: Annotated[str, Meta(max_length=256)]
    worker_addr: dict[str, dict[str, str]]


def page(engine_id: str, dp_rank: int, ranks: Ranks) -> bytes:
    """The page of one data-parallel rank of P."""
    workers: dict[str, dict[str, str]] = {}
    for (tp_rank, pp_rank), (host, port) in sorted(ranks.items()):
        workers.setdefault(str(tp_rank), {})[str(pp_rank)] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return json.dumps({str(dp_rank): {"engine_id": engine_id, "worker_addr": workers}}).encode()


def first_rank(content: bytes, engine_id: str) -> tuple[str, int]:
    """Host and control port of the first rank of an engine, from a page.

    Raises:
        ProtocolError: the page is malformed, or has no such engine.
    """
    try:
        entries = msgspec.json.decode(content, type=dict[str, _Entry])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"the bootstrap page is malformed: {quoted(str(error)[:200])}") from None
    for entry in entries.values():
        if entry.engine_id == engine_id:
            address = urlsplit(f"//{entry.worker_addr.get('0', {}).get('0', '')}")
            try:
                host, port = address.hostname, address.port
            except ValueError:
                host, port = None, None
            if host and port:
                return host, port
            raise ProtocolError("the bootstrap page has no address of the rank tp0 pp0")
    raise ProtocolError(f"the bootstrap page has no engine {quoted(engine_id)}")


def checked_url(text: str) -> tuple[str, int]:
    """Host and port of a bootstrap address such as ``http://10.0.0.1:8998``.

    Raises:
        ProtocolError: it is none.
    """
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        url, host, port = None, None, None
    usable = url is not None and url.scheme == "http" and url.path in ("", "/") and not url.query and "@" not in text
    if not usable or not host or not port:
        raise ProtocolError(f"remote_bootstrap_addr {quoted_url(text)} is no address, expected http://HOST:PORT")
    return host, port
