"""P and D engines: who owns which block, and what the ranks have to report of it.

An engine here does what vLLM's scheduler does with a connector: it gives blocks away and takes them back. It looks at
the bytes each time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.report import Check
from kvferry.connector.wire.metrics import Figures, add, no_figures
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    Load,
    PeerEngine,
    QueuedPrompt,
    RemoteLease,
    StepPlan,
    UnneededLease,
    pack_ids,
)
from tests.simulation.memory import BLOCK_TOKENS, Form
from tests.simulation.network import Network
from tests.simulation.node import TURN_SECONDS, Node
from tests.simulation.prefilling import STEP_SECONDS, Prefilling
from tests.simulation.prompts import Prompt, Request
from tests.simulation.searching import Searches
from tests.simulation.timeline import Violation

STANDS_AFTER_SECONDS = 60e-6
"""When the engine first looks whether a load inside a step stands."""


class Engine:
    """One life of one engine. ``fleet_done``: called with each request that has ended, and whether its load stands."""

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
            node.finished, node.freed, node.begun = self._finished, self._freed, self._begun
            node.told = lambda node, name, result: self.searches.told(node.name, name, result)
        self.free = list(range(form.blocks))
        self.consumer = self.timeline.rng.randbytes(16)
        self.peer = PeerEngine(name, form.tp_size, 1, settings.lease_seconds, tuple(n.address for n in self.nodes))
        self.prompts: dict[str, Prompt] = {}
        self.requests: dict[int, Request] = {}  # by the identity of the load
        self.kept: dict[Request, None] = {}
        self.searches = Searches(self)
        self.outcomes: Counter[str] = Counter()
        self.on_end: Callable[[Request, bool], None] = lambda request, ok: None
        self._prompts = 0
        self.prefilling: Prefilling | None = None
        """The prompt that is computed in steps."""
        self._waiting: deque[Callable[[], bool]] = deque()  # D: what loads each, and tells whether it waits no more
        self._wakes = False  # an event looks at these

    # --- P --------------------------------------------------------------------------------------------------------

    def prefill(
        self, num_tokens: int, late: Sequence[float | None] = (), *, number: int | None = None
    ) -> Prompt | None:
        """Compute a prompt, and lease its blocks. ``late``: by rank, after how many seconds the rank hears of the
        lease; ``None``: never. ``number``: of a prompt that another P has computed. ``None`` is returned where no block
        is free."""
        prompt = self._new_prompt(num_tokens, number)
        if prompt is None:
            return None
        name, blocks, number = prompt.name, prompt.blocks, prompt.number
        grant = LeaseGrant(name, prompt.token, num_tokens, (pack_ids(blocks),), prompt.digest)
        plan = StepPlan(leases=(grant,))
        for node in self.nodes:
            node.pages.fill(blocks, number)
            seconds = late[node.tp_rank] if late else 0.0
            if seconds is None:
                continue
            prompt.waiting.add(node.tp_rank)
            if seconds:
                self.timeline.after(seconds, lambda node=node: node.post(plan))  # type: ignore[misc]
            else:
                node.post(plan)
        self.prompts[name] = prompt
        if not prompt.waiting:
            self._end_prompt(prompt)
        return prompt

    def compute(self, num_tokens: int, step_tokens: int) -> Prompt | None:
        """Begin to compute a prompt that may be read meanwhile, ``step_tokens`` in each step. Returns ``None`` where no
        block is free, or another such prompt is computed."""
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
                    self._post_all(StepPlan(queued=(QueuedPrompt(transfer_id, token, names),)))
                self.timeline.after(STEP_SECONDS * (0.5 + self.timeline.rng.random()), lambda: begin(told=True))

        begin(told=False)

    def _new_prompt(self, num_tokens: int, number: int | None, token: bytes | None = None) -> Prompt | None:
        count = -(-num_tokens // BLOCK_TOKENS)
        if not self.alive or len(self.free) < count:
            return None
        self._prompts += 1
        number = self.network.new_prompt() if number is None else number
        blocks, self.free = self.free[:count], self.free[count:]
        for node in self.nodes:
            self._check_free(node, blocks)
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
        plan = StepPlan(consumer=self.consumer, keeps=keeps)
        for node in self.nodes:
            node.post(plan)
        self.kept[request] = None
        return request

    def load(
        self, request: Request, start: int = 0, *, now: bool = False, behind: bool = False, step_tokens: int = 0
    ) -> bool:
        """Load a request that is kept. ``step_tokens``: of a P that computes the prompt. Returns whether there were
        blocks for it."""
        prompt = request.prompt
        count = len(prompt.blocks)
        if not self.alive or request.phase != "kept" or len(self.free) < count:
            return False
        request.blocks, self.free = self.free[:count], self.free[count:]
        request.span, request.phase = (start, prompt.num_tokens), "loading"
        del self.kept[request]
        load = Load(
            request.name, prompt.token, prompt.peer, (pack_ids(request.blocks),), (request.span,), prompt.digest,
            now, behind, tuple(RemoteLease(other.token, other.peer) for other in request.others),
            step_tokens=step_tokens,
        )  # fmt: skip
        request.load, request.since = load, self.timeline.now
        request.waiting = {node.tp_rank for node in self.nodes}
        self.requests[id(load)] = request
        plan = StepPlan(consumer=self.consumer, loads=(load,))
        for node in self.nodes:
            self._check_free(node, request.blocks)
            node.post(plan)
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
        if request.phase == "kept":
            request.phase = "ended"
            del self.kept[request]
            prompts = (request.prompt, *request.others)
            releases = tuple(UnneededLease(request.name, prompt.token) for prompt in prompts)
            self._post_all(StepPlan(consumer=self.consumer, releases=releases))
            self.outcomes["aborted before the load"] += 1
            self.on_end(request, False)
        else:
            self._post_all(StepPlan(consumer=self.consumer, cancels=(request.name,)))

    def _post_all(self, plan: StepPlan) -> None:
        for node in self.nodes:
            node.post(plan)

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
        if not request.waiting:
            self._end_request(request)

    def _end_request(self, request: Request) -> None:
        assert request.load is not None
        del self.requests[id(request.load)]
        request.phase = "ended"
        for node in self.nodes:
            if node.tp_rank in request.failed:
                self._check_free(node, request.blocks)
            else:
                self._check_bytes(node, request, "has reported as loaded")
        self._take_back(request.blocks)
        ok = not request.failed
        self.outcomes["loaded" if ok else "failed"] += 1
        self.on_end(request, ok)

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

    # --- blocks ---------------------------------------------------------------------------------------------------

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
        if self.requests and not all(request.waiting == set() for request in self.requests.values()):
            raise Violation(f"{self.name} was closed, and has not reported {[r.name for r in self.requests.values()]}")
        self._end()

    def _end(self) -> None:
        if self.alive:
            self.alive = False
            for request in [*self.kept, *self.requests.values()]:
                request.phase = "ended"
                self.outcomes["gone with its engine"] += 1
                self.on_end(request, False)
            self.outcomes["gone with its engine"] += len(self.searches.open)
            self.kept.clear()
            self.requests.clear()

    def again(self) -> Engine:
        """The next life of the engine, at the same addresses."""
        engine = Engine(self.network, self.settings, self.form, self.name, self.addresses, self.planes, slow=self.slow)
        engine.on_end = self.on_end
        return engine

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
        if self.prefilling is not None:
            left.append(f"{self.name}: computes {self.prefilling.prompt.name}")
        if self.prompts:
            left.append(f"{self.name}: leases {[(p.name, sorted(p.waiting)) for p in self.prompts.values()][:3]}")
        if self.searches.open:
            left.append(f"{self.name}: waits for {list(self.searches.open)[:3]}")
        if self.requests or self.kept:
            left.append(f"{self.name}: requests {[r.name for r in (*self.requests.values(), *self.kept)][:3]}")
        if sorted(self.free) != list(range(self.form.blocks)):
            left.append(f"{self.name}: {self.form.blocks - len(self.free)} blocks are missing")
        for node in self.nodes:
            self._check_free(node, self.free)
        return left
