"""What became of the prompts that a decode engine (D) got with parameters of a prefill engine (P), as D itself counts
it: the router knows what it has sent, and only D knows what it has loaded. Pure.

D's ``/metrics`` page has all that D has counted since its start, also of other routers. A counter that has fallen is of
a D that was started anew.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.transport.errors import NO_PARAMS, NO_REPORT, what_to_do

LAST_PROMPTS = 20
"""Where of so many prompts in a row none was loaded, something is wrong with this D, or with what it is sent."""
FIRST_PROMPTS = 3
"""As many are enough where a P has never handed one over, or a D has loaded none since its start."""
PROMPTS, TOKENS = "vllm:kvferry_prompts_total", "vllm:prompt_tokens_by_source_total"
SERIES = tuple(f"{name}{{".encode() for name in (PROMPTS, TOKENS))
"""How the lines of a page begin that are of interest."""
RESULTS, SOURCES = ("loaded", "local", "failed"), {"external_kv_transfer": "loaded", "local_compute": "computed"}
NOTHING_TO_LOAD = ("cached", "whole_prompt", "other_connector", "ended")
"""D's reasons for which a prompt was not loaded, and nothing is wrong."""
_REASON = re.compile(r"[a-z_]{1,40}")
_MOST = float(1 << 53)
Counts = Counter[tuple[str, ...]]


def counts_of(lines: str) -> Counts:
    """What these lines of a page count: ("prompts", result, reason), ("tokens", source). Raises ValueError: they are
    no samples."""
    found: Counts = Counter()
    for family in text_string_to_metric_families(lines):
        for name, labels, value, *_ in family.samples:
            if not 0 <= value < _MOST:
                raise ValueError(f"{name} is {value}")
            result = labels.get("result", "")
            if name == PROMPTS and result in RESULTS:
                reason = labels.get("reason", "") if result != "loaded" else "none"
                found["prompts", result, reason if _REASON.fullmatch(reason) else "other"] += int(value)
            elif name == TOKENS:
                found["tokens", labels.get("source", "")] += int(value)
    return found


class HandedOver:
    """Of one D; of a P only ``known`` and ``degraded``."""

    def __init__(self) -> None:
        self.known = False  # D's page has said it; or a P has handed a prompt over
        self.degraded = ""  # None of the last prompts was handed over, and why; empty also where nobody knows
        self.logged = self.unreadable = False  # This is in the log; likewise, that its page is no page of metrics
        self.sent = 0  # Prompts with parameters of a P that D has answered, since one was handed over
        self._page: Counts | None = None
        self._missed: Counter[str] = Counter()  # likewise: prompts by reason
        self._computed = 0  # likewise: tokens, less those of D's own cache

    def prefilled(self, params: dict[str, Any] | None, status: int = 200) -> None:
        """P has answered a prompt with this status and these parameters for D."""
        self.sent = self.sent + 1 if params is None else 0
        self.known |= params is not None
        few = self.sent < (LAST_PROMPTS if self.known else FIRST_PROMPTS)
        why = NO_PARAMS if status == 200 else f"it answers {status}: has it D's --api-key and --served-model-name?"
        self.degraded = "" if few else f"none of its last {self.sent} answers had kv_transfer_params: {why}"

    def take(self, page: Counts) -> None:
        """D's page counts this now."""
        self.known, before, self._page = bool(page), self._page, page or self._page
        if not page or before is None:  # what D has counted before the first look is not of this router
            return
        restarted = any(page[key] < count for key, count in before.items())
        if restarted:
            self._missed.clear()
        grown = Counter({key: n for key, now in page.items() if (n := now - (0 if restarted else before[key]))})
        for key, count in grown.items():
            match key:
                case "prompts", "local" | "failed", reason if reason not in NOTHING_TO_LOAD:
                    self._missed[reason] += count
                case "tokens", source:
                    self._computed += {"local_compute": count, "local_cache_hit": -count}.get(source, 0)
        loaded: tuple[str, ...] = "prompts", "loaded", "none"
        if any(key[0] == "prompts" for key in page):
            prompts, reasons = min(self.sent, self._missed.total()), self._missed.most_common(3)
            why = ", ".join(f"{reason} {count}" for reason, count in reasons)
            why += "".join(f"; {what_to_do(reason)}" for reason, _ in reasons[:1])
        else:  # vLLM's own count says that it computed them
            loaded, prompts = ("tokens", "external_kv_transfer"), self.sent if self._computed > 0 else 0
            why = f"it has no {PROMPTS}, so it runs without KVFerry's connector or with an older one; {NO_REPORT}"
        if grown[loaded]:
            self.sent, self._computed, self.degraded = 0, 0, ""
            self._missed.clear()
        elif prompts >= (LAST_PROMPTS if page[loaded] else FIRST_PROMPTS):
            self.degraded = f"none of the last {prompts} prompts was handed over, for this reason: {why}"

    def status(self) -> dict[str, Any]:
        """For ``/router/status``: since D's start."""
        page, reasons = self._page or Counts(), Counter[str]()
        prompts, tokens = dict.fromkeys(RESULTS, 0), dict.fromkeys(SOURCES.values(), 0)
        for key, count in page.items():
            match key:
                case "prompts", result, reason:
                    prompts[result] += count * (reason not in NOTHING_TO_LOAD)
                    reasons[reason] += count * (result != "loaded")
                case "tokens", source if source in SOURCES:
                    tokens[SOURCES[source]] += count
        of = {"prompts": prompts, "tokens": tokens, "reasons": +reasons}
        return {"degraded": self.degraded or None, "known": self.known, **of}
