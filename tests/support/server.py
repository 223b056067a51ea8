"""An engine or a router that engines.py started, as seen from outside: by its HTTP server, its metrics and its log."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PATIENCE_SECONDS = 600.0
"""For an answer: a host may stand still, or have other work."""
_CAUSE = re.compile(r"\b\w*(Error|Exception): \S")
_STAGES = (
    ("Application startup complete", "answering soon"),
    ("Starting vLLM server", "starting HTTP"),
    ("init engine", "engine initialised"),
    ("GPU KV cache size", "KV cache allocated"),
    ("CPU KV cache size", "KV cache allocated"),
    ("Loading weights took", "weights loaded"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "engine process started"),
    ("non-default args", "reading the configuration"),
)


class EngineError(RuntimeError):
    """A process did not start, or ended; the message has the end of its log."""


@dataclass
class Server:
    """One process under a guard process. ``host`` and ``port`` are those of its HTTP server."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: int
    log: Path
    host: str
    port: int
    started: float = field(default_factory=time.monotonic)
    ready_seconds: float | None = None
    is_engine: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self, lines: int = 25) -> str:
        """The end of the log; before it the first line that names an error, which vLLM buries under later ones."""
        text = self.log_text().splitlines()
        cause = next((line for line in text if _CAUSE.search(line)), None)
        tail = text[-lines:]
        return "\n".join(tail if cause is None or cause in tail else [f"first error: {cause}", "...", *tail])

    def stage(self) -> str:
        """How far vLLM says in the log that its start has come."""
        text = self.log_text()
        return next((said for marker, said in _STAGES if marker in text), "importing vLLM")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = PATIENCE_SECONDS,
        headers: Mapping[str, str] = {},
    ) -> Any:
        """POST JSON, with these headers besides; the decoded answer.

        Raises:
            EngineError: an HTTP error, with the body, or no answer.
        """
        data = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise EngineError(f"{self.name}{path}: HTTP {error.code}: {error.read()[:500]!r}") from None
        except (OSError, http.client.HTTPException) as error:  # also where the engine ends in the middle of it
            raise EngineError(f"{self.name}{path}: {error}\n{self.log_tail()}") from None
        return json.loads(text) if text else None

    def warm_up(self) -> None:
        """One prompt of some tokens, computed here: the first forward pays for scratch memory.

        Without KVFerry it must also not be a single token: vLLM's AMX attention (bfloat16) would run before anybody
        asked the kernel for AMX, and a D that only ever loads prompts die of SIGILL.
        """
        self.post("/v1/completions", {"model": "model", "prompt": list(range(2, 66)), "max_tokens": 2})

    def rpc(self, method: str, *args: str) -> Any:
        """Call a method of the worker extension on every worker; the list of answers."""
        return self.post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """The Prometheus samples: (name, sorted labels) -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_SECONDS) as response:
            return parse_metrics(response.read().decode())

    def log_text(self) -> str:
        """All that it wrote so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def parse_metrics(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Prometheus text format -> {(name, sorted labels): value}."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metric_sum(
    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str
) -> float | None:
    """Sum of the samples of that name that have these labels; None where there is none of that name."""
    found = [
        value for (sample, have), value in samples.items() if sample == name and labels.items() <= dict(have).items()
    ]
    return sum(found) if found else None
