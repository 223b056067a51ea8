"""Hand-overs over an encrypted ``tcp``, between real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.transport.planes.tcp import Cipher
from tests.handover.gates import PATIENT
from tests.handover.opening import OURS, THEIRS, TOKENS, begin
from tests.handover.rank_group import RankGroup
from tests.support.ranks import wait


@pytest.mark.parametrize("content", [16, 64], ids=["slots", "pieces"])
@pytest.mark.parametrize("checksum", [False, True])
def test_the_bytes_of_p(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, checksum: bool, content: int
) -> None:
    caplog.set_level("INFO", "vllm.kvferry")
    opened = []
    real = Cipher.open

    def seen(self: Cipher, *args: object) -> bool:
        opened.append(self)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Cipher, "open", seen)
    common: dict[str, Any] = {"plane": "tcp", "slot_bytes": 64 << 10, "checksum": checksum, **PATIENT}
    p = group.rank(settings=Settings(**common), content=content)
    d = group.rank(settings=Settings(encrypt=True, **common), engine_id="engine-d", content=content)
    p.fill(THEIRS, TOKENS)
    for name in ("first", "second"):
        begin(p, d, name)
        assert wait(lambda name=name: f"{name}-d" in d.received and f"{name}-p" in p.sent, [p, d])
        assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    assert opened
    assert f"KV bytes from engine pp0 tp0 at 127.0.0.1:{p.address.port} are encrypted" in caplog.text
