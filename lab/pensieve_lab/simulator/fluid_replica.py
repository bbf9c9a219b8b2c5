"""A simplified replica for large fleets: no scheduler, no pages, dozens of times as fast as `Replica`.

Owns: a model of the engine at the level of turns:
  prompts    in order of arrival; each step takes as many of their tokens as it has room for beside the
             decodes;
  decodes    a token per step; a step takes the time that `StepTime` gives for its tokens and contexts;
  memory     contexts of running turns are on the device, and a turn that does not fit waits; idle
             conversations use the rest of both tiers, and the least recently used ones are evicted, from
             their beginning.
It leaves out pages, suspensions, orders other than LRU, prefetching, and the time of copies, except that a
first token waits for its own. The page about balance says how close it comes to `Replica`.
Does not know: routing.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from pensieve_jax.balance import Load
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.outputs import Usage
from pensieve_jax.scheduler import token_buckets
from pensieve_lab.simulator.profile import DeviceProfile
from pensieve_lab.simulator.step_time import StepLoad, StepTime
from pensieve_lab.workload.server import History
from pensieve_lab.workload.step_totals import Steps
from pensieve_lab.workload.turns import Answer, UserTurn

_OWN_SHARE = 0.75  # device share of tokens without a host copy; fitted to two runs of `Replica`
_GROWTH_SHARE = 0.02  # share of the device that is reserved for growing answers when a turn joins


@dataclass(slots=True, eq=False)
class _TurnInProgress:
    """Turn in progress.

    Attributes:
      turn: submitted turn.
      reported: tokens to compute that it adds to `load`.
      left: tokens still to compute.
      kept, on_host: reused tokens of its history, and those of them in host memory.
      context: its own tokens on the device.
      end: number of the step that makes its last token.
    """

    turn: UserTurn
    reported: int
    left: int = 0
    kept: int = 0
    on_host: int = 0
    context: int = 0
    first_token_s: float = 0.0
    end: float = math.inf


@dataclass(slots=True)
class _Block:
    """Block of equal steps: begin, number, duration of each, and prompt tokens of each."""

    begin_s: float
    num_steps: int
    step_s: float
    chunk: int

    @property
    def end_s(self) -> float:
        return self.begin_s + self.num_steps * self.step_s


class _Clock:
    """Time of the replica's next event; when idle, the time at which it became idle."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def now(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class FluidReplica:
    """`Server` of turns in virtual time, modelled as described in the module docstring."""

    def __init__(
        self, config: EngineConfig, profile: DeviceProfile, *, number: int = 0, start_s: float = 0.0
    ) -> None:
        """Start idle. `config.cache.cpu_bytes` must be converted to pages.

        Raises ConfigError for a profile of layers with windows: lengths of rows are not known here.
        """
        if any(window is not None for window, _ in profile.step.windows):
            limit = "a profile without windows, since fluid replicas know only the sum of all lengths"
            raise ConfigError("device_profile", profile.model, limit, "simulate it with `Replica` instead")
        self.number = number
        self.clock = _Clock(start_s)
        cache, scheduler = config.cache, config.scheduler
        self._gpu_tokens = cache.num_gpu_pages * cache.chunk_tokens
        host_tokens = cache.num_cpu_pages * cache.chunk_tokens
        self._all_tokens = max(self._gpu_tokens, host_tokens + round(_OWN_SHARE * self._gpu_tokens))
        self._room = round(self._gpu_tokens * _GROWTH_SHARE)
        self._max_num_running = scheduler.running_limit
        self._budget = scheduler.max_num_batched_tokens
        self._step_time = StepTime(profile.step, token_buckets(scheduler))
        self._host, self._fetch_s = profile.host, profile.fetch_s
        self._swap_token_s = profile.kv_token_bytes / profile.to_device.bytes_per_s
        self._compute_token_s = profile.step.token_s
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._idle_tokens = 0
        self._waiting: deque[_TurnInProgress] = deque()
        self._prompts: deque[_TurnInProgress] = deque()
        self._decoding: list[tuple[float, int, _TurnInProgress]] = []
        self._num_pushed = 0
        self._done_steps = 0
        self._used = 0  # device tokens of running turns
        self._prompt_used = self._left = 0  # of `_prompts`: device tokens, and tokens to compute
        self._longest = 0
        self._block: _Block | None = None
        self._compute_tokens = self._context_tokens = 0
        self._busy_s = 0.0

    @property
    def has_unfinished(self) -> bool:
        return self._block is not None

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self._decoding)

    @property
    def load(self) -> Load:
        """Load for routing: turns, tokens to compute and context tokens."""
        return Load(self.num_unfinished, self._compute_tokens, self._context_tokens)

    @property
    def unanswered(self) -> list[UserTurn]:
        """Submitted turns without an answer."""
        decoding = (served for _, _, served in self._decoding)
        return [served.turn for served in (*decoding, *self._prompts, *self._waiting)]

    def remember(self, histories: Iterable[History]) -> None:
        for history in histories:
            self._leave(history.conversation_id, history.num_tokens - 1)

    def submit(self, turn: UserTurn) -> None:
        num_known = min(self._idle.get(turn.conversation_id, 0), max(turn.num_history_tokens - 1, 0))
        served = _TurnInProgress(turn, turn.prompt_tokens + turn.num_history_tokens - num_known)
        self._compute_tokens += served.reported
        self._context_tokens += turn.prompt_tokens + turn.num_history_tokens
        self._waiting.append(served)
        if self._block is None:
            self._begin(max(self.clock.now_s, turn.arrival_s) + self._host.turn_s + self._host.step_s)
        elif not self._block.chunk:
            self._cut(turn.arrival_s)

    def step(self, until_s: float) -> list[Answer]:
        while (block := self._block) is not None:
            answers = self._finish(block)
            self._begin(block.end_s)
            if answers or self.clock.now_s >= until_s:
                return answers
        return []

    def counters(self) -> dict[str, float]:
        return {"num_steps": self._done_steps, "device_busy_s": self._busy_s}

    def steps(self) -> Steps:
        """Return nothing: steps are not counted by bucket."""
        return {}

    def _cut(self, arrival_s: float) -> None:
        """Shorten a block of decodes when a turn arrives; the running step and the next are already
        launched."""
        block = self._block
        assert block is not None
        num_steps = math.ceil((arrival_s - block.begin_s) / block.step_s) + 1
        if num_steps < block.num_steps:
            block.num_steps = max(num_steps, 1)
            self.clock.now_s = block.end_s

    def _begin(self, now_s: float) -> None:
        """Plan the next block of steps, if there is work."""
        self._admit()
        num_decoding = len(self._decoding)
        self.clock.now_s = now_s
        self._block = None
        if not (num_decoding or self._prompts):
            return
        room = max(self._budget - num_decoding, 1)
        left = min(self._left, room)
        num_steps = self._num_left()
        if self._prompts:
            num_steps = min(num_steps, max(self._prompts[0].left // room, 1))
        self._block = _Block(now_s, max(num_steps, 1), self._step_s(left), left)
        self.clock.now_s = self._block.end_s

    def _num_left(self) -> int:
        return round(self._decoding[0][0] - self._done_steps) if self._decoding else 1_000_000

    def _step_s(self, chunk: int) -> float:
        load, num_decoding = StepLoad(), len(self._decoding)
        load.num_rows = load.num_tokens = num_decoding
        load.num_single_kv = self._used - self._prompt_used
        load.longest_kv = self._longest
        if chunk:
            first = self._prompts[0]
            load.add(chunk, first.context - first.left + min(chunk, first.left))
            load.num_tokens = min(load.num_tokens, self._budget)
        host_s = self._host.step_s + self._host.row_s * load.num_rows + self._host.turn_s * bool(chunk)
        return max(self._step_time.seconds(load), host_s) + self._fetch_s

    def _admit(self) -> None:
        while self._waiting and len(self._decoding) + len(self._prompts) < self._max_num_running:
            served = self._waiting[0]
            turn = served.turn
            num_tokens = turn.num_history_tokens + turn.prompt_tokens
            if self._used and self._used + num_tokens + self._room > self._gpu_tokens:
                break
            self._waiting.popleft()
            kept = self._idle.pop(turn.conversation_id, 0)
            self._idle_tokens -= kept
            served.kept = min(kept, max(turn.num_history_tokens - 1, 0))
            served.left, served.context = num_tokens - served.kept, num_tokens
            on_device = max(self._gpu_tokens - self._used, 0) / max(self._idle_tokens + kept, 1)
            served.on_host = round(served.kept * max(1 - on_device, 0.0))
            self._used += num_tokens
            self._prompt_used += num_tokens
            self._left += served.left
            self._longest = max(self._longest, num_tokens)
            self._prompts.append(served)
        self._trim()

    def _finish(self, block: _Block) -> list[Answer]:
        """Apply the steps of a finished block, and return its answers."""
        num_steps = block.num_steps
        self._done_steps += num_steps
        self._busy_s += num_steps * block.step_s
        self._used += num_steps * len(self._decoding)
        left = block.chunk * num_steps
        while left and self._prompts:
            served = self._prompts[0]
            computed = min(served.left, left)
            served.left -= computed
            self._left -= computed
            left -= computed
            if served.left:
                break
            self._prompts.popleft()
            self._prompt_used -= served.context
            self._decode(served, block.end_s)
        answers = []
        while self._decoding and self._decoding[0][0] <= self._done_steps:
            _, _, served = heapq.heappop(self._decoding)
            answers.append(self._answer(served, block.end_s))
        if answers:
            self._longest = max((served.context for _, _, served in self._decoding), default=0)
        return answers

    def _decode(self, served: _TurnInProgress, now_s: float) -> None:
        """Start decoding; the first token waits for the history's copy from host memory."""
        turn = served.turn
        self._compute_tokens -= served.reported
        computed = served.context - served.kept
        late_s = max(served.on_host * self._swap_token_s - computed * self._compute_token_s, 0.0)
        served.first_token_s = now_s + late_s
        served.end = self._done_steps + turn.output_tokens - 1
        self._num_pushed += 1
        heapq.heappush(self._decoding, (served.end, self._num_pushed, served))

    def _answer(self, served: _TurnInProgress, now_s: float) -> Answer:
        turn = served.turn
        num_tokens = turn.num_history_tokens + turn.prompt_tokens + turn.output_tokens - 1
        self._used -= num_tokens
        self._context_tokens -= turn.num_history_tokens + turn.prompt_tokens
        self._leave(turn.conversation_id, num_tokens)
        lost = max(turn.num_history_tokens - 1, 0) - served.kept
        usage = Usage(
            prompt_tokens=turn.prompt_tokens,
            reused_gpu_tokens=served.kept - served.on_host,
            swapped_in_tokens=served.on_host,
            recomputed_tokens=lost,
            prefilled_tokens=turn.prompt_tokens + turn.num_history_tokens - served.kept - lost,
            output_tokens=turn.output_tokens,
        )
        return Answer(turn, self.number, served.first_token_s, max(now_s, served.first_token_s), usage)

    def _leave(self, conversation_id: str, num_tokens: int) -> None:
        self._idle_tokens += num_tokens - self._idle.pop(conversation_id, 0)
        self._idle[conversation_id] = num_tokens
        self._trim()

    def _trim(self) -> None:
        """Evict the least recently used tokens that exceed the memory."""
        excess = self._idle_tokens + self._used - self._all_tokens
        while excess > 0 and self._idle:
            conversation_id, num_tokens = next(iter(self._idle.items()))
            given = min(num_tokens, excess)
            excess -= given
            self._idle_tokens -= given
            if given == num_tokens:
                del self._idle[conversation_id]
            else:
                self._idle[conversation_id] = num_tokens - given
