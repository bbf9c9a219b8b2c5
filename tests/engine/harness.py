"""An observed engine on a bench's runner: the base of drivers and of tests by name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from pensieve_jax.cache import AnalyticCostModel, CachedSequence, ChunkState, DropReason, EvictionClass
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.live import Branch
from pensieve_jax.engine.loop import Observe, unobserved
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import open_store
from pensieve_jax.scheduler import Request, RequestStatus, SchedulerOutput
from pensieve_jax.text import Tokenizer
from tests.engine.draft_oracle import num_accepted_of
from tests.engine.fake_transfers import IMMEDIATE, Delays
from tests.engine.observed import ObservedRunner, ObservedStore
from tests.engine.oracles import Bench, FakeBench, TurnFacts, prompt_ids, spec_of
from tests.scheduler.priority import check_priority

MAX_STEPS = 20_000


def small_config(
    *,
    gpu_pages: int = 40,
    chunk_tokens: int = 16,
    max_num_running: int = 8,
    max_num_batched_tokens: int = 128,
    stateful: bool = True,
    max_context_tokens: int | None = None,
    max_num_rows: int | None = None,
    **cache: object,
) -> EngineConfig:
    """A configuration for a few short conversations."""
    return EngineConfig(
        stateful=stateful,
        cache=CacheConfig(gpu_pages=gpu_pages, chunk_tokens=chunk_tokens, **cache),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_batched_tokens,
            max_context_tokens=max_context_tokens,
            max_num_rows=max_num_rows,
            max_num_buckets=2,
        ),
        runner=RunnerConfig(max_banned_ids=32, max_logprobs=4),
    )


class Harness:
    """An engine, its observed runner and store, and its clock.

    Attributes:
        scheduled: the scheduler's decisions, by step, empty steps included.
        num_granted: tokens computed so far, by request, without drafts.
        swapped_in: history tokens that had been copied in, and not dropped since, when a request was first
            admitted; None for one that begins with a shared prefix.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        bench: Bench | None = None,
        path: Path | str | None = None,
        clock: VirtualClock | None = None,
        max_model_tokens: int = 2000,
        tokenizer: Tokenizer | None = None,
        delays: Delays = IMMEDIATE,
    ) -> None:
        config = config or small_config()
        self.bench = bench or FakeBench()
        self.config = config
        self.clock = clock or VirtualClock(1000.0)
        self.store = ObservedStore(open_store(path, fingerprint="test"))
        self.max_context_tokens = config.resolve_context_tokens(max_model_tokens)
        self.runner = ObservedRunner(self.bench.new_runner(config, self.max_context_tokens, delays))
        limits = ModelLimits(
            vocab_size=self.bench.vocab_size,
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=self.bench.eos_token_ids,
            max_logprobs=config.runner.max_logprobs,
            max_banned_ids=config.runner.max_banned_ids,
        )
        # Attention makes up all of the cost, as in a long context, so the policy takes the leading chunks of
        # every conversation before any tail: that makes as many holes as possible.
        cost_model = AnalyticCostModel(config.cache.chunk_tokens, num_weights=0, attention_width=1)
        self.engine = Engine(
            self.runner,
            config,
            limits,
            self.store,
            tokenizer=tokenizer,
            cost_model=cost_model,
            clock=self.clock,
            observe=self._see,
        )
        self.on_step: Observe = unobserved  # a test may install its own observer
        self.scheduled: list[SchedulerOutput] = []
        self.num_granted: Counter[Request] = Counter()
        self.swapped_in: dict[Request, int | None] = {}
        # By sequence, while its turn waits: tokens with KV, and chunks that are being copied in.
        self._before: dict[str, tuple[int, Sequence[int]]] = {}
        self._copied_in: dict[str, set[int]] = defaultdict(set)  # by sequence, since its latest turn was sent
        self.runner.transfers.on_completed = self._look_at_waiting

    def take_num_computed(self, request: Request) -> tuple[int, int]:
        """Return the number of a request's tokens that steps computed, and of those in drafts that held.

        Tokens of drafts count if they held. This forgets the request.
        """
        num_accepted = num_accepted_of(self.engine, request)
        return self.num_granted.pop(request) + num_accepted, num_accepted

    def _look_at_waiting(self, copy_ids: Sequence[int]) -> None:
        """Record what queued turns have after these copies, just before the engine schedules."""
        for request in self.engine._ledger.replies:
            if request.status is RequestStatus.WAITING:
                self._look_at(request.sequence, copy_ids)

    def _see(self, output: SchedulerOutput) -> None:
        self.scheduled.append(output)
        check_priority(self.engine._loop.scheduler, self.engine._cache, output)
        for grant in output.grants:
            self.num_granted[grant.request] += grant.end - grant.start - len(grant.draft)
        for drop in output.drops:
            self._copied_in[drop.conversation_id].discard(drop.index)
        if output.swap_ins:
            self._record_swap_ins({copy.page for copy in output.swap_ins})
        for request in output.admitted:
            self.swapped_in.setdefault(request, self._num_tokens_copied_in(request))
        self.on_step(output)

    def _look_at(self, sequence: CachedSequence, copy_ids: Sequence[int]) -> None:
        """Record it just before it may be admitted; a cancelled turn may have left copies in flight."""
        arriving = (
            sequence.indices_of(EvictionClass.ARRIVING)
            if sequence.num_by_class[EvictionClass.ARRIVING]
            else ()
        )
        arriving = [index for index in arriving if sequence.chunks[index].copy_id not in copy_ids]
        self._before[sequence.sequence_id] = sequence.num_kv_tokens, arriving

    def _num_tokens_copied_in(self, request: Request) -> int | None:
        if request.sequence.num_shared:
            return None
        chunk_tokens, sequence_id = self.config.cache.chunk_tokens, request.sequence.sequence_id
        num_tokens, arriving = self._before[sequence_id]
        indices = self._copied_in[sequence_id].union(arriving)
        return sum(max(min(chunk_tokens, num_tokens - i * chunk_tokens), 0) for i in indices)

    def _record_swap_ins(self, pages: set[int]) -> None:
        for sequence in self.engine._cache._store:
            own_chunks = sequence.chunks[sequence.num_shared :]
            found = (i for i, chunk in enumerate(own_chunks, sequence.num_shared) if chunk.page in pages)
            self._copied_in[sequence.sequence_id].update(found)

    def facts(
        self, prompt: Sequence[int], conversation_id: str | None = None, seed: int = 0, **params: object
    ) -> TurnFacts:
        """Return the facts that determine a turn that is sent now."""
        known = {info.conversation_id for info in self.store.conversations()}
        history = self.history(conversation_id) if conversation_id in known else ()
        parameters = SamplingParams(**{"ignore_eos": True, "seed": seed} | params)
        return TurnFacts(history, tuple(prompt), parameters, seed, self.max_context_tokens)

    def expected(self, facts: TurnFacts) -> tuple[int, ...]:
        """Return the reply of the fake reference."""
        return tuple(self.bench.continuation(facts))

    def history(self, conversation_id: str) -> tuple[int, ...]:
        """Return the committed tokens."""
        return tuple(self.store.load(conversation_id).token_ids.tolist())

    def submit(self, facts: TurnFacts, conversation_id: str | None = None) -> Turn:
        self.engine.expire_idle()
        return self.submit_all([spec_of(facts, conversation_id)])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[Turn]:
        turns = self.engine.submit(specs)
        for turn in turns:
            self._copied_in.pop(turn.request.sequence.sequence_id, None)
        return turns

    def step(self, count: int = 1) -> list[Turn]:
        """Step `count` times, check integrity after each, and return the turns that the last step ended."""
        ended = []
        for _ in range(count):
            ended = self.engine.step()
            self.engine.check_integrity()
        return ended

    def run(self, *turns: Turn) -> list[Output]:
        """Step until these turns are done, then until nothing is in flight; raise their errors."""
        self.drain()
        for turn in turns:
            assert turn.done
            if turn.error is not None:
                raise turn.error
        return [turn.output for turn in turns]

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished:
                return
            self.step()
        raise AssertionError("turns do not end")

    def turn(
        self, conversation_id: str | None, prompt_len: int = 10, *, seed: int = 0, **params: object
    ) -> Output:
        """Run one random turn to its end and check it against the reference."""
        facts = self.facts(self.prompt(prompt_len, seed), conversation_id, seed, **params)
        (output,) = self.run(self.submit(facts, conversation_id))
        self.bench.check_tokens(facts, output.token_ids, whole=True)
        return output

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        return prompt_ids(seed, length, self.bench.vocab_size)

    def drop(self, conversation_id: str, *chunks: int) -> None:
        """Evict chunks of an idle conversation, bypassing the policy."""
        cache = self.engine._cache
        sequence = self.engine.conversations.get(conversation_id).sequence
        for chunk in chunks:
            cache._store.drop(sequence, chunk, DropReason.NO_HOST_MEMORY, None)
        cache._store.trim(sequence)
        cache.check_integrity()

    @property
    def cpu_tier_is_full(self) -> bool:
        """Tell whether there is a CPU tier without a free slot."""
        slots = self.engine._cache._store.slots
        return slots.num_places > 0 and not slots.num_free

    @property
    def has_passed_requests(self) -> bool:
        """Tell whether a request runs that arrived after one that waits."""
        scheduler = self.engine._loop.scheduler
        running, waiting = scheduler.running[-1:], scheduler.waiting[:1]
        return bool(running and waiting) and running[0].request_id > waiting[0].request_id

    @property
    def num_copies(self) -> int:
        """Number of copies in flight."""
        store = self.engine._cache._store
        return store.num_copies_in + store.num_copies_out

    def finish_copies(self) -> None:
        """Wait for every copy in flight."""
        for _ in range(MAX_STEPS):
            if not self.num_copies:
                return
            self.runner.transfers.wait()
            self.step()
        raise AssertionError("copies do not end")

    def _drop_prefixes(self) -> None:
        """Evict what is left of the prefixes, which no conversation uses any more."""
        store = self.engine._cache._store
        for sequence in store:
            if sequence.is_trunk:
                for index in range(len(sequence.chunks)):
                    if sequence.chunks[index].state is not ChunkState.DROPPED:
                        store.drop(sequence, index, DropReason.NO_HOST_MEMORY, None)

    def forget_branches(self) -> None:
        """Remove every idle branch from memory, as a sweep removes those without KV cache."""
        table = self.engine.conversations
        for live in list(table._live.values()):
            if isinstance(live, Branch) and not live.busy:
                table.forget(live)
        self.engine.check_integrity()

    def check_empty(self) -> None:
        """Check that nothing runs, and that ending every conversation frees every page and every slot."""
        for info in self.store.conversations():
            self.engine.end(info.conversation_id)
        self.forget_branches()
        self._drop_prefixes()
        self.engine.check_integrity()
        self.finish_copies()
        stats = self.engine.stats()
        assert stats["num_available_gpu_pages"] == stats["num_gpu_pages"], "a page was lost"
        assert stats["num_free_gpu_pages"] == stats["num_gpu_pages"], "a page was not freed"
        assert stats["num_free_cpu_pages"] == stats["num_cpu_pages"], "a slot was not freed"
        assert stats["num_live_conversations"] == 0, "a conversation was left in memory"
