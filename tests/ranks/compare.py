"""What must hold of a hand-over beside its bytes, from first principles: nothing of what is judged is asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.ranks.pairing import Pairing, Rank
from tests.ranks.rank_host import PROCESSES, RankProcesses, Seen

Taken = tuple[str, int, int]  # (kind, layer, head), global
Read = tuple[Rank, Taken, list[int]]  # (P rank, what, tokens) of something that a D rank asked for


def check(processes: RankProcesses, pairing: Pairing, *, inside: bool = False) -> Seen:
    """Run a pairing and compare. Raises AssertionError: what differs, with the command that repeats it."""
    gpus = f" --gpus {processes.gpus}" if processes.gpus else ""
    again = f"{pairing}\n  again: python tests/ranks/sweep.py --pairing {pairing}{gpus}"
    try:
        seen = processes.run(pairing, inside=inside)
    except RuntimeError as error:
        raise AssertionError(f"{again}\n  {error}") from error
    complaints = compare(pairing, seen)
    assert not complaints, "\n  ".join([again, *complaints])
    return seen


def compare(pairing: Pairing, seen: Seen) -> list[str]:
    """Complaints, one line each; none where all is well."""
    complaints: list[str] = []
    taken = {rank: list(_taken(pairing, found)) for rank, found in seen.d.items()}
    if set(seen.p) != set(pairing.p.ranks()) or set(seen.d) != set(pairing.d.ranks()):
        complaints.append("not every rank was there")
    ranks, processes = len(seen.p) + len(seen.d), {found["pid"] for found in (*seen.p.values(), *seen.d.values())}
    if len(processes) != min(ranks, PROCESSES):
        complaints.append(f"{ranks} ranks in {len(processes)} processes")
    for rank, found in sorted(seen.d.items()):
        who = f"D pp{rank[0]} tp{rank[1]}"
        if not found["done"] or found["failed"]:
            complaints.append(f"{who}: its load " + ("failed" if found["failed"] else "was never reported"))
            continue
        if found["wrong"]:
            complaints.append(f"{who}: {found['wrong']}")
        if pairing.plane not in ("auto", *found["bytes"]):
            complaints.append(f"{who}: moved over {sorted(found['bytes'])}, expected {pairing.plane}")
        if sum(found["bytes"].values()) != found["bytes_wanted"]:
            complaints.append(f"{who}: {found['bytes']} bytes came, {found['bytes_wanted']} are the least")
        complaints += [f"{who}: {line}" for line in _asked(pairing, rank, taken[rank])]
    return [*complaints, *_spread(pairing, taken), *_freed(pairing, seen, taken)]


def _taken(pairing: Pairing, found: dict[str, Any]) -> Iterator[Read]:
    """Everything that a D rank asked for: of a span's tokens those that are in its share, and that P holds."""
    for source, spans in found["asks"]:
        held = [group for group in pairing.groups("p", tuple(source)) if group[1]]
        for group, layer, num_layers, head, num_heads, token, num_tokens, (size, number, turn) in spans:
            kind, layers, heads = held[group]
            there = pairing.p.held(source[1], token + num_tokens)
            tokens = [t for t in there if t >= token and t // turn % size == number]
            for n in layers[layer : layer + num_layers]:
                for h in heads[head : head + num_heads]:
                    yield tuple(source), (kind, n, h), tokens


def _asked(pairing: Pairing, rank: Rank, taken: list[Read]) -> Iterator[str]:
    """Each token of each head that a reader needs crosses once, and no other."""
    asked: dict[Taken, list[int]] = {}
    for _, what, tokens in taken:
        asked.setdefault(what, []).extend(tokens)
    for what in [(kind, n, h) for kind, layers, heads in pairing.groups("d", rank) for n in layers for h in heads]:
        tokens, wanted = sorted(asked.pop(what, [])), pairing.asked(what[0], rank)
        if len(set(tokens)) < len(tokens) or (wanted and not tokens):
            yield f"asked not once for {what}"
        elif tokens != wanted:
            yield f"asked for other tokens of {what} than {wanted}"
    if asked:
        yield f"asked for {sorted(asked)}, which it does not hold"


def _spread(pairing: Pairing, taken: dict[Rank, list[Read]]) -> Iterator[str]:
    """The readers of a head spread evenly over the ranks that hold it, or a share of its tokens."""
    p, d = pairing.p, pairing.d
    if pairing.tokens - pairing.start < 2 * math.lcm(p.dcp * p.interleave, d.dcp * d.interleave) and p.dcp * d.dcp > 1:
        return  # who reads is chosen for all prompts alike, and some have nothing to read of so short a one
    readers: dict[tuple[Taken, int], Counter[Rank]] = {}
    for rank in pairing.p.ranks():
        for kind, layers, heads in pairing.groups("p", rank):
            for what in ((kind, n, h) for n in layers for h in heads):
                readers.setdefault((what, rank[1] % p.dcp), Counter())[rank] = 0
    for asked in taken.values():
        for source, what, _ in asked:
            readers[what, source[1] % p.dcp][source] += 1
    for where, counts in readers.items():
        if max(counts.values()) - min(counts.values()) > 1:
            yield f"readers of {where} are not spread over its replicas: {dict(counts)}"


def _freed(pairing: Pairing, seen: Seen, taken: dict[Rank, list[Read]]) -> Iterator[str]:
    """P frees when all that read there, at any of its stages, have released at every stage; unread ranks free too.
    Beside readers, ranks may release that would read of a longer prompt."""
    readers: dict[int, set[int]] = {tp: set() for tp in range(pairing.p.size)}
    for rank, asked in taken.items():
        for source, _, _ in asked:
            readers[source[1]].add(rank[1])
    for rank, found in sorted(seen.p.items()):
        who = f"P pp{rank[0]} tp{rank[1]}"
        if not found["done"] or found["why_freed"] != "released":
            yield f"{who}: its blocks were not released ({found['why_freed'] or 'still held'})"
            continue
        votes = found["released_when_freed"]
        by_tp = {number % pairing.d.size for number in votes}
        reading = readers[rank[1]]
        waiting = {tp for tp in by_tp - reading if not _common(pairing, rank[1], tp)}
        right = reading <= by_tp <= reading | waiting if reading or waiting else len(by_tp) == 1
        wanted = sorted(pp * pairing.d.size + tp for pp in range(pairing.d.pp) for tp in by_tp)
        if not right or sorted(votes) != wanted:
            yield f"{who}: freed after D's ranks {votes} released, its readers are tp {sorted(readers[rank[1]])}"


def _common(pairing: Pairing, p_rank: int, d_rank: int) -> bool:
    """Whether both hold tokens to carry."""
    both = set(pairing.p.held(p_rank, pairing.tokens)) & set(pairing.d.held(d_rank, pairing.tokens))
    return max(both, default=-1) >= pairing.start
