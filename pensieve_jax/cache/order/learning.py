"""The online learning of the order `learned`: events of turns update the return model and policy selector.

Owns: the consistency of the policy, the return log and the policy selector.
Does not know: chunks, tiers or victims.
Called by the cache manager and, through `CacheManager.turns`, by the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.cache.order.cost import CostModel
from pensieve_jax.cache.order.learned_state import LearnedState
from pensieve_jax.cache.order.policies import ORDERS, EvictionPolicy, LearnedPolicy, ReturnsPolicy, orders_of
from pensieve_jax.cache.order.policy_selector import BLOCK_TOKENS, PolicySelector
from pensieve_jax.cache.order.return_log import ReturnLog
from pensieve_jax.cache.order.returns import ReturnModel, bucket_of
from pensieve_jax.cache.sequence import CachedSequence
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.clock import Clock

type SetBucket = Callable[[CachedSequence, int], None]


class TurnObserver:
    """An observer of turns that ignores all events, for orders that do not learn."""

    def sent(self, sequence: CachedSequence, num_history_tokens: int) -> None:
        """Note that a turn was sent to a conversation; the first turn has no history."""

    def answered(
        self, sequence: CachedSequence, num_history_tokens: int, *, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Note that a turn was answered, which the history includes; the conversation is now idle."""

    def left(self, sequence: CachedSequence, num_history_tokens: int) -> None:
        """Note that a conversation with a history is now idle, for example after a withdrawn turn."""

    def resized(self, sequence: CachedSequence) -> None:
        """Note that a conversation's number of shared leading chunks changed."""

    def ended(self, conversation_id: str) -> None:
        """Note that a conversation was ended and cannot return."""

    def learned_state(self) -> LearnedState | None:
        """Return the learned state; None if the order does not learn."""
        return None

    def begin(self, learned_state: LearnedState | None) -> None:
        """Restart from `learned_state`, without observing the conversations that are idle now."""

    def stats(self) -> dict[str, int | float]:
        """Return counters since the start."""
        return {}

    def describe(self) -> str | None:
        """Explain which order is in use and why; None if the order does not learn."""
        return None


class LearningObserver(TurnObserver):
    """The learning of one cache."""

    def __init__(
        self,
        policy: LearnedPolicy,
        cost_model: CostModel,
        clock: Clock,
        *,
        chunk_tokens: int,
        num_chunks: int,
        set_bucket: SetBucket,
        learned_state: LearnedState | None,
    ) -> None:
        """Start from `learned_state`, for the cache's `policy` and its capacity of `num_chunks` chunks."""
        self._policy = policy
        self._cost_model = cost_model
        self._clock = clock
        self._set_bucket = set_bucket
        self._chunk_tokens = chunk_tokens
        self._num_tokens = num_chunks * chunk_tokens
        self.begin(learned_state)

    def begin(self, learned_state: LearnedState | None) -> None:
        policy = self._policy
        known = (None, None) if learned_state is None else (learned_state.returns, learned_state.exposure_s)
        policy.use(ReturnModel(*known))
        by_returns = ReturnsPolicy(policy.model, self._cost_model, BLOCK_TOKENS)
        self._log = ReturnLog(policy.model)
        self._selector = PolicySelector(
            orders_of(by_returns, self._cost_model, BLOCK_TOKENS),
            self._cost_model,
            selected=ORDERS[0] if learned_state is None else learned_state.selected,
            chunk_tokens=self._chunk_tokens,
            num_tokens=self._num_tokens,
            losses=None if learned_state is None else learned_state.losses,
        )
        policy.select(self._selector.selected)

    def sent(self, sequence: CachedSequence, num_history_tokens: int) -> None:
        if not num_history_tokens:
            return
        self._log.returned(sequence.sequence_id, self._clock.now())
        self._selector.returned(sequence.sequence_id, num_history_tokens, self._num_shared_tokens(sequence))
        self._policy.select(self._selector.selected)

    def answered(
        self, sequence: CachedSequence, num_history_tokens: int, *, prompt_tokens: int, output_tokens: int
    ) -> None:
        is_first = num_history_tokens == prompt_tokens + output_tokens
        if is_first:  # a shared prefix is not what the user sent
            prompt_tokens -= min(self._num_shared_tokens(sequence), prompt_tokens)
        bucket = bucket_of(is_first=is_first, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self._set_bucket(sequence, bucket)
        self.left(sequence, num_history_tokens)

    def left(self, sequence: CachedSequence, num_history_tokens: int) -> None:
        """See `TurnObserver`; `sequence.bucket` is the bucket of the latest turn."""
        now_s, name = self._clock.now(), sequence.sequence_id
        self._log.left(name, sequence.bucket, now_s)
        num_shared = self._num_shared_tokens(sequence)
        self._selector.left(name, num_history_tokens, num_shared, bucket=sequence.bucket, now_s=now_s)

    def resized(self, sequence: CachedSequence) -> None:
        self._selector.resized(sequence.sequence_id, self._num_shared_tokens(sequence))

    def ended(self, conversation_id: str) -> None:
        self._log.ended(conversation_id, self._clock.now())
        self._selector.ended(conversation_id)

    def learned_state(self) -> LearnedState:
        """See `TurnObserver`; idle conversations count as observed until now."""
        model = self._policy.model
        exposure_s = model.exposure_s + self._log.open_exposure_s(self._clock.now())
        return LearnedState(model.returns.copy(), exposure_s, self._selector.selected, self._selector.losses)

    def stats(self) -> dict[str, int | float]:
        """See `TurnObserver`: recomputation time of each order, changes of order, and observed returns."""
        lost_s = {f"shadow_{name}_recompute_s": s for name, s in self._selector.lost_s.items()}
        return lost_s | {
            "num_order_changes": self._selector.num_changes,
            "num_returns_seen": self._log.num_returns,
        }

    def describe(self) -> str:
        lost_s = dict(zip(self._selector.names, self._selector.losses.sums_s, strict=True))
        if not any(lost_s.values()):
            why = "no order has lost anything yet"
        else:
            why = "estimated recomputation: " + ", ".join(f"{name} {s:.3g} s" for name, s in lost_s.items())
        return f"following {self._policy.selected!r}: {why}"

    def _num_shared_tokens(self, sequence: CachedSequence) -> int:
        return sequence.num_shared * self._chunk_tokens


def make_turn_observer(
    policy: EvictionPolicy,
    config: CacheConfig,
    cost_model: CostModel,
    clock: Clock,
    *,
    set_bucket: SetBucket,
    learned_state: LearnedState | None,
) -> TurnObserver:
    """Return the turn observer for this policy.

    It reports the bucket of each sequence's latest turn through `set_bucket`, because orders use it. The
    order that learns starts from `learned_state`.
    """
    if not isinstance(policy, LearnedPolicy):
        return TurnObserver()
    # Chunks that are copied out ahead of need occupy a place in both tiers.
    num_chunks = config.num_gpu_pages + max(config.num_cpu_pages - config.clean_pages, 0)
    return LearningObserver(
        policy,
        cost_model,
        clock,
        chunk_tokens=config.chunk_tokens,
        num_chunks=num_chunks,
        set_bucket=set_bucket,
        learned_state=learned_state,
    )
