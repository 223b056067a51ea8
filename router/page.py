"""The status page of a router: what ``/router/status`` has, for a browser, which loads it again every 2 s. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="2">
<title>KVFerry router</title>
<style>
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 66rem; padding: 0 1.25rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #8884; overflow-wrap: anywhere; }
.degraded, .down { color: #d33; font-weight: 600; }
</style>
"""
NOTHING = "-"
OF_D = ("engine", "state", "requests", "prompts", "handed over", "tokens handed over", "not handed over, by reason")
OF_P = ("engine", "state", "requests", "prompt tokens to compute")


def page(status: Mapping[str, Any]) -> str:
    """As HTML. ``status``: of ``/router/status``."""
    health, state = status["health"], status["health"]["status"]
    p, d = ([one for one in status["engines"] if one["role"] == role] for role in ("prefill", "decode"))
    faults = ["No decode engine takes requests."] * (state == "down")
    faults += [f"{url}: {fault}. See docs/troubleshooting.md." for url, fault in health.get("handed_over", {}).items()]
    said = [one["handed_over"] for one in d]
    prompts, tokens = (_share(pair for one in said for pair in one[name].items()) for name in ("prompts", "tokens"))
    return (
        f'{HEAD}<h1>KVFerry router: <span class="{state}">{state}</span></h1>\n'
        + "".join(f'<p class="degraded">{escape(fault)}</p>\n' for fault in faults)
        + f"<p>Handed over: {prompts} of prompts, {tokens} of prompt tokens, since each decode engine's start. "
        f"In flight: {status['in_flight']}; the oldest waits for a byte for {status['oldest_waiting_seconds']} s.</p>\n"
        + _table("Decode engines", OF_D, map(_row, d))
        + _table("Prefill engines", OF_P, ([*_begin(engine), f"{engine['load']:,.0f}"] for engine in p))
    )


def _begin(engine: Mapping[str, Any]) -> list[str]:
    return [engine["url"], engine["state"] + ", passed over" * engine["passed_over"], str(engine["requests"])]


def _row(engine: Mapping[str, Any]) -> list[str]:
    said = engine["handed_over"]
    prompts = f"{sum(said['prompts'].values()):,}" if said["known"] else NOTHING
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in said["reasons"].items())
    shares = [_share(said[name].items()) for name in ("prompts", "tokens")]
    return [*_begin(engine), prompts, *shares, reasons if said["known"] else "the engine does not say"]


def _share(counts: Iterable[tuple[str, int]]) -> str:
    """The part of ``loaded``."""
    counts = list(counts)
    whole = sum(count for _, count in counts)
    return f"{sum(count for name, count in counts if name == 'loaded') / whole:.0%}" if whole else NOTHING


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<h2>{title}</h2>\n<table>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>\n"
