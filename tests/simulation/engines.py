"""P and D engines: who owns which block, and what the ranks have to report of it.

An engine here does what vLLM's scheduler and KVFerry's scheduler half do: it gives blocks away and takes them back, and
posts the plans. It looks at the bytes each time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import RequestView
from kvferry.connector.scheduler.load_planner import MAX_PATIENCE
from kvferry.connector.step_loads.step_loads import Check
from kvferry.connector.wire import params
from kvferry.connector.wire.metrics import Figures, add, no_figures
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, prompt_of_answer, to_transfer_params
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    LeftAnswer,
    Load,
    LookupResult,
    PeerEngine,
    Prefill,
    PrefillChunk,
    PrefillStop,
    PromptLookup,
    QueuedPrompt,
    RemoteLease,
    StepPlan,
    UnneededLease,
    pack_ids,
)
from kvferry.transport.errors import ProtocolError
from tests.simulation.memory import BLOCK_TOKENS, Form
from tests.simulation.network import Network, Violation
from tests.simulation.node import TURN_SECONDS, Node

STANDS_AFTER_SECONDS = 60e-6
"""When the engine first looks whether a load inside a step stands."""
STEP_SECONDS = 2e-3
SOON_SECONDS = 200e-6
PREEMPTED, GIVEN_UP = 0.08, 0.02
"""How likely these are at the end of a step: half of them before its bytes are there, half soon after it."""


def view(name: str, number: int, num_tokens: int) -> RequestView:
    """A request for the prompt ``number``."""
    return RequestView(name, None, [number] * num_tokens, num_tokens, 0)


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that P computes or has computed, or what P has told D of one. ``waiting``: P's ranks that have a lease
    of it and have not reported its end."""

    name: str
    number: int
    token: bytes
    blocks: list[int]
    num_tokens: int
    peer: PeerEngine
    waiting: set[int] = field(default_factory=set)
    digest: str = ""

    def __post_init__(self) -> None:
        self.digest = self.digest or prompt_digest([self.number] * self.num_tokens)

    def lease(self) -> StepPlan:
        grant = LeaseGrant(self.name, self.token, self.num_tokens, (pack_ids(self.blocks),), self.digest)
        return StepPlan(leases=(grant,))


@dataclass(slots=True, eq=False)
class Request:
    """A request of D. ``others``: the same prompt at other P engines. ``phase``: kept, loading, ended. ``waiting``: D's
    ranks that have not reported its load."""

    name: str
    prompt: Prompt
    siblings: bool
    others: Sequence[Prompt] = ()
    phase: str = "kept"
    blocks: list[int] = field(default_factory=list)
    load: Load | None = None
    span: tuple[int, int] = (0, 0)
    waiting: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Search:
    """A request that knows P's prompt by a name only. ``found``: called with what may be loaded, once. ``deadline``,
    ``end``: as in ``AwaitedPrompt``."""

    view: RequestView
    found: Callable[[Request, LookupResult], None]
    deadline: float
    end: float


class Engine:
    """One life of one engine."""

    def __init__(
        self,
        network: Network,
        settings: Settings,
        form: Form,
        name: str,
        addresses: Sequence[tuple[str, int]],
        planes: Sequence[str],
        *,
        slow: float = 0.0,
    ) -> None:
        self.network, self.timeline, self.form, self.name = network, network.timeline, form, name
        self.settings, self.addresses, self.planes, self.slow = settings, addresses, planes, slow
        self.alive = True
        self.nodes = [
            Node(network, settings, form, name, rank, address, planes, slow) for rank, address in enumerate(addresses)
        ]
        for node in self.nodes:
            node.finished, node.freed, node.begun, node.told = self._finished, self._freed, self._begun, self._told
        self.free = list(range(form.blocks))
        self.life = self.timeline.rng.randbytes(16)
        self.peer = PeerEngine(name, form.tp_size, 1, settings.lease_seconds, tuple(n.address for n in self.nodes))
        self.prompts: dict[str, Prompt] = {}
        self.requests: dict[int, Request] = {}  # by the identity of the load
        self.kept: dict[Request, None] = {}
        self.searches: dict[str, Search] = {}
        self._left: set[str] = set()  # requests that searched
        self.outcomes: Counter[str] = Counter()
        self._prompts = 0
        self.prefilling: Prefilling | None = None
        """The prompt that is computed in steps."""
        self._waiting: deque[Callable[[], bool]] = deque()  # D: what loads each, and tells whether it waits no more
        self._wakes = False  # an event looks at these

    def post(self, plan: StepPlan) -> None:
        for node in self.nodes:
            node.post(plan)

    # --- P --------------------------------------------------------------------------------------------------------

    def prefill(
        self, num_tokens: int, late: Sequence[float | None] = (), *, number: int | None = None
    ) -> Prompt | None:
        """Compute a prompt, and lease its blocks; ``None`` where no block is free. ``late``: by rank, after how many
        seconds the rank hears of the lease; ``None``: never. ``number``: of a prompt that another P has computed."""
        prompt = self._new_prompt(num_tokens, number)
        if prompt is None:
            return None
        plan = prompt.lease()
        for node in self.nodes:
            node.pages.fill(prompt.blocks, prompt.number)
            seconds = late[node.tp_rank] if late else 0.0
            if seconds is None:
                continue
            prompt.waiting.add(node.tp_rank)
            if seconds:
                self.timeline.after(seconds, lambda node=node: node.post(plan))  # type: ignore[misc]
            else:
                node.post(plan)
        self.prompts[prompt.name] = prompt
        if not prompt.waiting:
            self._end_prompt(prompt)
        return prompt

    def compute(self, num_tokens: int, step_tokens: int) -> Prompt | None:
        """Begin to compute a prompt that may be read meanwhile, ``step_tokens`` in each step; ``None`` where no block
        is free, or another such prompt is computed."""
        prompt = self._new_prompt(num_tokens, None) if self.prefilling is None else None
        if prompt is not None:
            self.prefilling = Prefilling(self, prompt, step_tokens, (prompt.name,))
        return prompt

    def queue(self, number: int, num_tokens: int, step_tokens: int, transfer_id: str) -> None:
        """A request has come whose prompt is computed as soon as no other one is. D may find it by ``transfer_id``."""
        token, names = self.timeline.rng.randbytes(16), (transfer_id,)

        def begin(*, told: bool) -> None:
            prompt = self._new_prompt(num_tokens, number, token) if self.prefilling is None else None
            if prompt is not None:
                self.prefilling = Prefilling(self, prompt, step_tokens, names)
            elif self.alive:
                if not told:
                    self.post(StepPlan(queued=(QueuedPrompt(transfer_id, token, names),)))
                self.timeline.after(STEP_SECONDS * (0.5 + self.timeline.rng.random()), lambda: begin(told=True))

        begin(told=False)

    def _new_prompt(self, num_tokens: int, number: int | None, token: bytes | None = None) -> Prompt | None:
        blocks = self.take(-(-num_tokens // BLOCK_TOKENS))
        if blocks is None:
            return None
        self._prompts += 1
        number = self.network.new_prompt() if number is None else number
        name = f"{self.name}-p{number}-{self._prompts}"
        return Prompt(name, number, token or self.timeline.rng.randbytes(16), blocks, num_tokens, self.peer)

    def _freed(self, node: Node, name: str) -> None:
        prompt = self.prompts.get(name)
        if prompt is None or node.tp_rank not in prompt.waiting:
            raise Violation(f"{node.name} frees {name}, which it does not hold")
        prompt.waiting.remove(node.tp_rank)
        if not prompt.waiting:
            self._end_prompt(prompt)

    def _end_prompt(self, prompt: Prompt) -> None:
        del self.prompts[prompt.name]
        self._take_back(prompt.blocks)

    # --- D --------------------------------------------------------------------------------------------------------

    def keep(self, prompt: Prompt, name: str, *, siblings: bool = False, others: Sequence[Prompt] = ()) -> Request:
        """A request has come that may load a prompt."""
        request = Request(name, prompt, siblings, others)
        keeps = tuple(KeepLease(name, each.token, each.peer, siblings) for each in (prompt, *others))
        self.post(StepPlan(decode_engine=self.life, keeps=keeps))
        self.kept[request] = None
        return request

    def load(
        self, request: Request, start: int = 0, *, now: bool = False, behind: bool = False, step_tokens: int = 0
    ) -> bool:
        """Load a request that is kept. ``step_tokens``: of a P that computes the prompt. Returns whether there were
        blocks for it."""
        prompt = request.prompt
        blocks = self.take(len(prompt.blocks)) if request.phase == "kept" else None
        if blocks is None:
            return False
        request.blocks, request.span, request.phase = blocks, (start, prompt.num_tokens), "loading"
        del self.kept[request]
        request.load = Load(
            request.name, prompt.token, prompt.peer, (pack_ids(blocks),), (request.span,), prompt.digest,
            now, behind, tuple(RemoteLease(other.token, other.peer) for other in request.others),
            step_tokens=step_tokens, seconds=self.timeline.rng.choice((0.0, math.inf)),
        )  # fmt: skip
        request.waiting = {node.tp_rank for node in self.nodes}
        self.requests[id(request.load)] = request
        self.post(StepPlan(decode_engine=self.life, loads=(request.load,)))
        return True

    def wait(self, load: Callable[[], bool]) -> None:
        """Call ``load`` whenever blocks have become free, until it returns that its request waits no more. Those that
        wait come first in their order."""
        self._waiting.append(load)

    def _wake(self) -> None:
        self._wakes = False
        while self._waiting and self._waiting[0]():
            self._waiting.popleft()

    def abort(self, request: Request) -> None:
        """The client has gone."""
        if not self.alive or request.phase == "ended":
            return
        if request.phase == "loading":
            self.post(StepPlan(decode_engine=self.life, cancels=(request.name,)))
            return
        request.phase = "ended"
        del self.kept[request]
        prompts = (request.prompt, *request.others)
        releases = tuple(UnneededLease(request.name, prompt.token) for prompt in prompts)
        self.post(StepPlan(decode_engine=self.life, releases=releases))
        self.outcomes["aborted before the load"] += 1

    def _finished(self, node: Node, load: Load, ok: bool) -> None:
        request = self.requests.get(id(load))
        if request is None or node.tp_rank not in request.waiting:
            raise Violation(f"{node.name} reports {load.request_id} once more, {'loaded' if ok else 'failed'}")
        request.waiting.remove(node.tp_rank)
        if ok:
            self._check_bytes(node, request, "reports as loaded")
            node.pages.check_unused(request.blocks)
        else:
            request.failed.add(node.tp_rank)
            node.pages.free(request.blocks)
        if request.waiting:
            return
        del self.requests[id(load)]
        request.phase = "ended"
        for each in self.nodes:
            if each.tp_rank in request.failed:
                self._check_free(each, request.blocks)
            else:
                self._check_bytes(each, request, "has reported as loaded")
        self._take_back(request.blocks)
        self.outcomes["failed" if request.failed else "loaded"] += 1

    def _begun(self, node: Node, load: Load, stands: Check | None) -> None:
        """The copies of a load inside a step are under way."""

        def look(left: int) -> None:
            request = self.requests.get(id(load))
            if stands is None or request is None or not node.alive or node.tp_rank not in request.waiting:
                return
            answer = stands()
            if answer:
                self._check_bytes(node, request, "says that stands")
                self.network.counts["loads inside a step that stood"] += 1
            elif answer is None and left:
                self.timeline.after(STANDS_AFTER_SECONDS, lambda: look(left - 1))

        look(20)

    # --- D asks by name: what ``load_planner`` does, with its check of the prompt and its deadline ------------------

    def search(
        self,
        request: RequestView,
        p: Engine,
        transfer_id: str,
        found: Callable[[Request, LookupResult], None],
        *,
        ended: bool = False,
    ) -> None:
        """A request has come. ``ended``: it has ended, too, before D's ranks have heard of it."""
        now, timeout, name = self.timeline.now, self.settings.handover_timeout_seconds, request.request_id
        host, port = p.addresses[0]
        if ended:
            self._left.add(name)
        else:
            self.searches[name] = Search(request, found, now + timeout, now + MAX_PATIENCE * timeout)
            self._look_at(self.searches[name])
        left = LeftAnswer(name, params.possible_digests(request)) if ended else None
        wanted = PromptLookup(name, host, port, p.name, transfer_id, ended=left)
        self.post(StepPlan(decode_engine=self.life, lookups=(wanted,)))

    def abort_search(self, name: str, why: str) -> None:
        """The client has gone, or time is over."""
        search = self.searches.pop(name, None) if self.alive else None
        if search is not None:
            self.outcomes[why] += 1
            self._leave(search)

    def _leave(self, search: Search) -> None:
        name = search.view.request_id
        self._left.add(name)
        left = LeftAnswer(name, params.possible_digests(search.view))
        self.post(StepPlan(decode_engine=self.life, left=(left,)))

    def _told(self, node: Node, name: str, result: LookupResult) -> None:
        """A rank reports P's word."""
        search = self.searches.get(name)
        if search is None:
            if name not in self._left:
                raise Violation(f"{node.name} reports the lookup of {name} once more")
            return
        if result.known:
            search.deadline = min(self.timeline.now + self.settings.handover_timeout_seconds, search.end)
            self.network.counts["P has the prompt in its queue, or computes it"] += 1
            return
        del self.searches[name]
        if result.error:
            self.outcomes["not found by its name"] += 1
            return
        remote = prompt_of_answer(result.params)
        try:
            params.check_prompt(search.view, remote)
        except ProtocolError:
            self.network.counts["another prompt under the name"] += 1
            self._leave(search)
            return
        blocks = [0] * -(-remote.num_tokens // BLOCK_TOKENS)  # as many as D needs; P's own are not told
        number = (search.view.prompt_token_ids or (0,))[0]
        prompt = Prompt(name, number, remote.token, blocks, remote.num_tokens, remote.peer, digest=remote.digest)
        search.found(self.keep(prompt, name), result)

    def _look_at(self, search: Search) -> None:
        """When its deadline has passed, the request waits no more."""

        def look() -> None:
            if self.searches.get(search.view.request_id) is not search:
                return
            if self.timeline.now >= search.deadline:
                self.abort_search(search.view.request_id, "not found in time")
            else:
                self._look_at(search)

        self.timeline.after(search.deadline - self.timeline.now, look)

    # --- blocks ---------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        """Free blocks, if there are so many."""
        if not self.alive or len(self.free) < count:
            return None
        blocks, self.free = self.free[:count], self.free[count:]
        for node in self.nodes:
            self._check_free(node, blocks)
        return blocks

    def _take_back(self, blocks: list[int]) -> None:
        for node in self.nodes:
            node.pages.free(blocks)
        self.free += blocks
        if len(self.free) > self.form.blocks:
            raise Violation(f"{self.name} got a block back twice")
        if self._waiting and not self._wakes:
            self._wakes = True
            self.timeline.after(TURN_SECONDS, self._wake)

    def _check_free(self, node: Node, blocks: list[int]) -> None:
        if not node.pages.untouched(blocks):
            raise Violation(f"{node.name}: blocks {blocks} were written while they were free")

    def _check_bytes(self, node: Node, request: Request, what: str) -> None:
        if not node.pages.holds(request.blocks, request.prompt.number, *request.span):
            raise Violation(f"{node.name}: other bytes in {request.name}, which it {what}")

    # --- life -----------------------------------------------------------------------------------------------------

    def kill(self, *, silently: bool = False) -> None:
        """All processes of the engine end at once."""
        self._end()
        for node in self.nodes:
            node.kill(silently=silently)

    def close(self) -> None:
        """The engine shuts down in order: what still runs is reported."""
        for node in self.nodes:
            node.close()
        if any(request.waiting for request in self.requests.values()):
            raise Violation(f"{self.name} was closed, and has not reported {[r.name for r in self.requests.values()]}")
        self._end()

    def _end(self) -> None:
        if self.alive:
            self.alive = False
            requests = [*self.kept, *self.requests.values()]
            self.kept.clear()
            self.requests.clear()
            for request in requests:
                request.phase = "ended"
            self.outcomes["gone with its engine"] += len(requests) + len(self.searches)

    def again(self) -> Engine:
        """The next life of the engine, at the same addresses."""
        return Engine(self.network, self.settings, self.form, self.name, self.addresses, self.planes, slow=self.slow)

    def figures(self) -> Figures:
        """What the ranks have counted since the last call."""
        total = no_figures()
        for node in self.nodes:
            figures = node.context.stats.take()
            if figures is not None:
                add(total, figures)
        return total

    def check(self) -> None:
        """Nothing is past its deadline."""
        for node in self.nodes:
            for what in node.overdue() if node.alive else ():
                raise Violation(f"{node.name} is past a deadline: {what}")

    def left(self) -> list[str]:
        """What is left on any rank, in words."""
        if not self.alive:
            return []
        left = [f"{node.name}: {what}" for node in self.nodes for what in node.left()]
        ours: dict[str, list[Any]] = {
            "computes": [] if self.prefilling is None else [self.prefilling.prompt.name],
            "leases": [(prompt.name, sorted(prompt.waiting)) for prompt in self.prompts.values()],
            "waits for": list(self.searches),
            "requests": [request.name for request in (*self.requests.values(), *self.kept)],
            "blocks that are missing:": sorted(set(range(self.form.blocks)) - set(self.free)),
        }
        left += [f"{self.name}: {what} {found[:3]}" for what, found in ours.items() if found]
        for node in self.nodes:
            self._check_free(node, self.free)
        return left


class Prefilling:
    """A prompt that an engine P computes in steps while D reads it: preempted at times, or given up. One at a time.

    The bytes of a step come into the blocks at its end. Until then the blocks hold what nobody may take for KV."""

    def __init__(self, engine: Engine, prompt: Prompt, step_tokens: int, names: tuple[str, ...]) -> None:
        """``names``: by which D may ask for the prompt."""
        self.engine, self.prompt, self.step_tokens = engine, prompt, step_tokens
        self._timeline = engine.timeline
        self._told = 0  # blocks that the ranks know
        told = RemotePrompt(prompt.token, prompt.num_tokens, prompt.digest, prompt.peer)
        prefill = Prefill(
            prompt.name, prompt.token, prompt.num_tokens, prompt.digest, names,
            msgspec.msgpack.encode(to_transfer_params(told)), 0, step_tokens, streams=True,
        )  # fmt: skip
        engine.post(StepPlan(prefills=(prefill,)))
        self._later(lambda: self._begin(0))

    def _later(self, act: Callable[[], None], about: float = 2 * STEP_SECONDS) -> None:
        """After some time, ``about`` seconds at most, if the engine still lives."""
        seconds = about * self._timeline.rng.random()
        self._timeline.after(seconds, lambda: act() if self.engine.alive else None)

    def _begin(self, start: int, *, restarts: bool = False) -> None:
        """A step begins."""
        prompt = self.prompt
        stop = min(start + self.step_tokens, prompt.num_tokens)
        self._told = 0 if restarts else self._told
        new = prompt.blocks[self._told : -(-stop // BLOCK_TOKENS)]
        self._told += len(new)
        chunk = PrefillChunk(prompt.token, start, stop, (pack_ids(new),), restarts, start)
        self.engine.post(StepPlan(prefill_chunks=(chunk,)))
        self._later(lambda: self._end(start, stop))

    def _end(self, start: int, stop: int) -> None:
        """The device has ended the step, unless the engine takes the blocks back before."""
        rng, prompt, engine = self._timeline.rng, self.prompt, self.engine
        dice, late = rng.random(), rng.random() < 0.5
        lost, ended = dice < PREEMPTED + GIVEN_UP, dice < GIVEN_UP
        if lost and not late:
            self._take_back(ended=ended)
            return
        for node in engine.nodes:
            if node.alive:
                node.pages.compute(prompt.blocks, prompt.number, start, stop)
                node.prefills.end_step()
        if lost:  # while copies read what has just been computed
            self._later(lambda: self._take_back(ended=ended), SOON_SECONDS)
        elif stop < prompt.num_tokens:
            self._later(lambda: self._begin(stop))
        else:
            prompt.waiting = {node.tp_rank for node in engine.nodes}
            engine.prompts[prompt.name] = prompt
            engine.prefilling = None
            engine.post(prompt.lease())

    def _take_back(self, *, ended: bool) -> None:
        engine, blocks = self.engine, self.prompt.blocks
        engine.network.counts["prompts given up" if ended else "prompts preempted"] += 1
        engine.post(StepPlan(stops=(PrefillStop(self.prompt.token, ended),)))
        for node in engine.nodes:
            node.prefills.end_step()
        for node in engine.nodes:
            node.pages.take_back(blocks)
        engine.free += blocks
        if ended:
            engine.prefilling = None
        else:
            self._later(self._resume)

    def _resume(self) -> None:
        """The engine computes the prompt anew, in other blocks."""
        blocks = self.engine.take(len(self.prompt.blocks))
        if blocks is None:
            self._later(self._resume)
        else:
            self.prompt.blocks = blocks
            self._begin(0, restarts=True)
