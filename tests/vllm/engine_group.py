"""Engines on demand, and the lines that they log."""

from __future__ import annotations

import logging
from typing import Any

from tests.vllm.stepped import Engine

PATIENT = {
    "handshake_timeout_seconds": 600.0, "transfer_timeout_seconds": 600.0, "ask_hold_seconds": 600.0,
    "handover_timeout_seconds": 600.0, "lease_seconds": 600.0,
}  # fmt: skip
"""Times that no test reaches: what ends or is freed has ended or been released, on a loaded machine as well."""


class EngineGroup:
    """Makes engines and closes them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.engines: list[Engine] = []

    def engine(self, origin: int, extra: dict[str, Any] | None = None, **kwargs: Any) -> Engine:
        extra = extra or {}
        if "connectors" not in extra:
            extra = {**PATIENT, **extra}
        engine = Engine(self._model, origin, extra=extra, **kwargs)
        self.engines.append(engine)
        return engine

    def pair(self, **kwargs: Any) -> tuple[Engine, Engine]:
        """P and D with the same settings, small staging slots: even a short prompt is several chunks."""
        extra = {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20, **kwargs.pop("extra", {})}
        return self.engine(0, extra=extra, **kwargs), self.engine(1, extra=extra, **kwargs)


class Lines(logging.Handler):
    """What was logged below ``vllm.kvferry``, which does not reach the root logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __call__(self, *words: str, level: int = logging.INFO) -> list[str]:
        """The lines that have all these words."""
        texts = [record.getMessage() for record in self.records if record.levelno >= level]
        return [text for text in texts if all(word in text for word in words)]
