"""Leases of an engine: how many blocks they hold, and for how long."""

from __future__ import annotations

from kvferry.connector.engine.lease_planner import HeldBlocks


def test_blocks_and_their_time():
    now = 10.0
    held = HeldBlocks(lambda: now)
    held.add("a", 5)
    now = 12.0
    held.add("b", 10)
    assert (len(held), held.blocks, "a" in held) == (2, 15, True)
    now = 13.0
    assert held.take_block_ms() == 5 * 2000 + 15 * 1000, "leases that have not ended count, too"
    held.remove(["a", "unknown"])
    now = 14.0
    held.remove(["b"])
    held.remove(["b"])
    now = 100.0
    assert (len(held), held.blocks, held.take_block_ms()) == (0, 0, 10 * 1000)


def test_an_id_that_comes_again_and_parts_of_milliseconds():
    now = 0.0
    held = HeldBlocks(lambda: now)
    held.add("a", 5)
    held.add("a", 1)
    assert held.blocks == 1
    total = 0
    for step in range(1, 1001):
        now = step * 0.0005
        total += held.take_block_ms()
    assert abs(total - 500) <= 1
