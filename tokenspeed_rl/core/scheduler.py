"""Which requests run in the next step, and on which pages: plain Python, no tensor, deterministic.

Every step decodes each running request by one token and fills a token budget with prompt chunks: those begun
first, then new requests in queue order. A request gets the pages of all its known tokens when it is admitted,
and one more whenever a page is full. When none is left, the youngest running request (those that a pause kept
across a change of the weights last of all) gives up its pages and returns to its place in the queue, with
everything it has sampled. The oldest always advances, so everything ends.
"""

import heapq

from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.core.batch import Chunk, StepPlan
from tokenspeed_rl.core.request import Request, Status


class Scheduler:
    """Queue, running set and their pages. One thread owns it."""

    def __init__(self, cache: PrefixCache, *, max_running: int, prefill_budget: int) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.max_running = max_running
        self.prefill_budget = prefill_budget
        self.running: list[Request] = []
        self.num_retractions = 0
        self.num_preemptions = 0
        """Of the retractions, those for lack of pages."""
        self._queue: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._num_waiting)

    def add(self, request: Request) -> None:
        """Queue a request, new or retracted, at the place its priority and arrival give it."""
        request.status = Status.WAITING
        request.mixed = False  # it has no KV, so none of older weights
        self._num_waiting += 1
        heapq.heappush(self._queue, (request.rank, request))

    def remove(self, request: Request) -> None:
        """Take a finished request out, wherever it is; its full pages stay in the prefix cache."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._let_go(request)
        elif request.status is Status.WAITING:
            self._num_waiting -= 1  # its queue entry is dropped when it comes up
            if not self._num_waiting:
                self._queue.clear()
        request.status = Status.FINISHED

    def retract(self, request: Request) -> None:
        """Back to the queue without its pages."""
        self.running.remove(request)
        self._let_go(request)
        if request.output_len == 0:
            request.prompt_logprobs, request.readings, request.routes = [], [], []  # the prompt starts over
        self.num_retractions += 1
        self.add(request)

    def distrust(self, request: Request) -> bool:
        """What a running request computed is not finite: nobody may find its pages any more. Where the fault
        may be of KV that it borrowed, it starts over, and computes all itself; False: it is its own."""
        self.cache.forget(request.pages)
        if request.alone or not request.borrowed:
            return False
        request.alone = True
        self.retract(request)
        return True

    def retract_all(self) -> None:
        """Back to the queue with everything that runs."""
        for request in list(self.running):
            if request.status is Status.RUNNING:
                self.retract(request)

    def freeze(self) -> None:
        """The weights change and what runs keeps its KV, computed under the old ones: `Request.mixed`. What
        reads its prompt starts over: it has nothing to lose, and is to be of one version."""
        for request in [r for r in self.running if r.wants.reading]:
            if request.status is Status.RUNNING:
                self.retract(request)
        for request in self.running:
            request.mixed = request.mixed or request.computed > 0 or request.leader is not None

    def schedule(self) -> StepPlan:
        """Decide the next step. The plan is empty only when nothing can run."""
        plan = StepPlan()
        retracted = self._plan_decodes(plan)
        budget = self._plan_chunks(plan, self.prefill_budget)
        if not retracted:
            self._admit(plan, budget)
        for chunk in plan.chunks:
            if chunk.completes:
                self._fork_followers(chunk.request, plan)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The step was computed: its tokens now have keys and values."""
        for request in plan.decodes:
            request.computed += 1
        for chunk in plan.chunks:
            chunk.request.computed += chunk.count

    def _plan_decodes(self, plan: StepPlan) -> bool:
        """Decode what can be; whether anything had to be retracted for it."""
        retractions = self.num_retractions
        for request in sorted(self.running, key=lambda r: r.seniority):
            if request.status is not Status.RUNNING or not request.is_decoding:
                continue
            if request.computed == len(request.pages) * self.page_size and not self._extend(request):
                continue
            plan.decodes.append(request)  # for good: whoever is retracted from here on is younger
            self._keep_pages(request, request.computed + 1)
        return self.num_retractions > retractions

    def _extend(self, request: Request) -> bool:
        """One more page for a running request, retracting younger ones as needed; False: it had to go
        itself."""
        while (page := self.cache.allocate(1)) is None:
            victim = max(self.running, key=lambda r: r.seniority)
            self.retract(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        request.pages += page
        return True

    def _plan_chunks(self, plan: StepPlan, budget: int) -> int:
        """Go on with prompts begun in earlier steps; returns what is left of the budget."""
        for request in self.running:
            if request.leader is None and not request.is_decoding and budget > 0:
                budget -= self._add_chunk(request, plan, budget)
        return budget

    def _add_chunk(self, request: Request, plan: StepPlan, budget: int) -> int:
        count = min(request.remaining, budget)
        plan.chunks.append(Chunk(request, request.computed, count))
        # The pages this chunk fills can be found from now on, by requests admitted in this very step: within
        # a layer, all keys and values are written before any are read.
        self._keep_pages(request, request.computed + count)
        return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        leaders = {self._prompt_key(r): r for r in self.running if self._can_lead(r)}
        while len(self.running) < self.max_running and (request := self._next_waiting()):
            follows = request.output_len == 0 and not request.alone
            leader = leaders.get(self._prompt_key(request)) if follows else None
            if leader is not None:
                request.leader = leader
                leader.followers.append(request)
            elif budget <= 0 or not self._take_pages(request):
                return
            heapq.heappop(self._queue)
            self._num_waiting -= 1
            request.status = Status.RUNNING
            self.running.append(request)
            if leader is None:
                budget -= self._add_chunk(request, plan, budget)
                if self._can_lead(request):
                    leaders[self._prompt_key(request)] = request

    def _next_waiting(self) -> Request | None:
        while self._queue and self._queue[0][1].status is not Status.WAITING:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _can_lead(self, request: Request) -> bool:
        fresh = request.output_len == 0 and request.remaining > 0
        return fresh and request.leader is None and not request.mixed and not request.alone

    def _prompt_key(self, request: Request) -> tuple[object, ...]:
        start = request.wants.prompt_start
        asked = (start, request.params.temperature) if start >= 0 else ()
        tokens = tuple(request.tokens[: request.prompt_len])
        return (request.lora, tokens, asked, request.wants.routed_experts)

    def _take_pages(self, request: Request) -> bool:
        """Match the prefix and take the other pages; False, with nothing held, where they aren't there.

        One page per running request stays in reserve, else admitting a request would soon cost another its
        place.
        """
        pages, node = self.cache.match(request.tokens, request.reusable_prompt, request.lora)
        needed = -(-len(request.tokens) // self.page_size) - len(pages)
        fits = needed + len(self.running) <= self.cache.num_available
        fresh = self.cache.allocate(needed) if fits else None
        if fresh is None:
            self.cache.release(pages)
            return False
        request.pages = pages + fresh
        request.node = node
        request.kept_pages = len(pages)
        request.borrowed = bool(pages)
        request.computed = len(pages) * self.page_size
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        return True

    def _keep_pages(self, request: Request, end: int) -> None:
        """Make the pages that tokens before `end` fill findable in the prefix cache."""
        request.spared.clear()
        if request.mixed or request.alone or request.wants.reading == "values":  # nobody is to use those
            return
        node, size = request.node, self.page_size
        assert node is not None
        for number in range(request.kept_pages, end // size):
            key = tuple(request.tokens[number * size : (number + 1) * size])
            own = request.pages[number]
            node, request.pages[number] = self.cache.insert(node, key, own)
            if request.pages[number] != own:
                request.spared.append(number)
                request.borrowed = True
        request.node = node
        request.kept_pages = end // size

    def _fork_followers(self, leader: Request, plan: StepPlan) -> None:
        """Followers get the computed prompt: full pages shared, the unfinished one copied."""
        full, rest = divmod(leader.prompt_len, self.page_size)
        for request in leader.followers:
            fresh = self.cache.allocate(1) if rest else []
            request.leader = None
            if fresh is None:
                self.running.remove(request)
                self.add(request)
                continue
            for page in leader.pages[:full]:
                self.cache.pool.share(page)
            request.pages = leader.pages[:full] + fresh
            request.node, request.kept_pages, request.mixed = leader.node, leader.kept_pages, leader.mixed
            request.borrowed = leader.borrowed
            request.computed = request.cached_tokens = request.prompt_len
            plan.forks[request] = leader
            plan.copies += [(leader.pages[full], page) for page in fresh]
        leader.followers = []

    def _let_go(self, request: Request) -> None:
        """Give up pages, leader and followers."""
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
        for follower in request.followers:
            follower.leader = None
            self.running.remove(follower)
            self.add(follower)
        request.followers = []
        self.cache.release(request.pages)
        request.pages, request.node, request.computed, request.kept_pages = [], None, 0, 0
        request.borrowed = False
