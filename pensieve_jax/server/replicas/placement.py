"""Places new conversations: it names each new root so that the router sends it to the cheapest replica.

Owns: the turns that this front end has in flight, the replica loads that follow from them, and new roots.
Does not know: Ray, messages, or where a turn with a root goes, which the router's hash ring decides.

`balance.RootPlacement` is the rule. A load consists of this front end's own turns: their prompts, and the
context lengths after the last turn of their roots. With several front ends, each balances only its own turns.
This module does not know whether a follow-up turn hits the cache; it assumes a miss only for a retried turn.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from pensieve_jax.balance import IncomingTurn, Load, RootPlacement, Speeds
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.turn_node import new_root
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.replicas.stream import RoutedReply

_FLOP_PER_S: Final = 4e14
_BYTES_PER_S: Final = 3.5e12
"""Approximate rates of a device. Only their ratio affects the placement."""
_OUTPUT_TOKENS: Final = 200.0
"""Assumed tokens of a reply until the first turn has finished."""
_PROMISED_S: Final = 5.0
"""How long a new root counts before its turn is sent. The limit is needed because its request may fail."""
_MAX_ROOTS: Final = 100_000
"""Conversations whose length is remembered. A longer conversation costs its replica more."""


class _Sent:
    """Unfinished turn: the replica that owns its root now, and its token counts when it was sent."""

    __slots__ = ("key", "num_history_tokens", "num_tokens", "owner")

    def __init__(self, key: str, owner: str, num_tokens: int, num_history_tokens: int) -> None:
        self.key, self.owner = key, owner
        self.num_tokens, self.num_history_tokens = num_tokens, num_history_tokens


class RootPlacer:
    """Names for new roots, chosen by the loads of the replicas. Thread-safe."""

    def __init__(self, hash_key: Callable[[str], int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._hash_key, self._now_s = hash_key, now_s
        self._rule: RootPlacement | None = None
        self._names: frozenset[str] = frozenset()
        self._ready: frozenset[str] = frozenset()
        self._max_tokens = 0
        self._sent: dict[RoutedReply, _Sent] = {}
        self._promised: OrderedDict[str, tuple[float, _Sent]] = OrderedDict()
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def update(
        self, replicas: Mapping[str, bool], info: EngineInfo, stats: Mapping[str, Any] | None = None
    ) -> None:
        """Update the replicas that answer and whether each accepts turns; `stats` are the sums over all."""
        speeds = speeds_of(info, stats or {})
        with self._lock:
            self._max_tokens = info.limits.max_context_tokens
            self._ready = frozenset(name for name, is_ready in replicas.items() if is_ready)
            if self._rule is None:
                self._rule = RootPlacement(speeds, hash_key=self._hash_key, other_names=_others)
            self._rule.speeds = speeds
            if self._names != replicas.keys():  # a new ring takes a hundred hashes per replica
                self._names = frozenset(replicas)
                self._rule.set_members(self._names)
                for sent in (*self._sent.values(), *(sent for _, sent in self._promised.values())):
                    sent.owner = self._owner(sent.key)

    def new_root(self, num_tokens: int) -> str:
        """Return a root for a conversation whose first prompt has about `num_tokens` tokens."""
        root = new_root()
        with self._lock:
            if self._rule is None or len(self._names) < 2 or not self._ready:
                return root
            num_tokens = min(num_tokens, self._max_tokens)  # longer prompts are refused
            named = self._rule.name(IncomingTurn(root, root, num_tokens, 0), self._loads())
            self._promised[named] = self._now_s(), _Sent(named, self._owner(named), num_tokens, 0)
        return named

    def sent(self, key: str, replies: Iterable[RoutedReply]) -> None:
        """Record that turns of one root were sent."""
        with self._lock:
            self._promised.pop(key, None)
            owner, num_history_tokens = self._owner(key), self._lengths.get(key, 0)
            for reply in replies:
                self._sent[reply] = _Sent(key, owner, reply.spec.num_new_tokens, num_history_tokens)

    def ended(self, replies: Iterable[RoutedReply]) -> None:
        """Record that sent turns have ended, with any result."""
        with self._lock:
            for reply in replies:
                sent = self._sent.pop(reply, None)
                output = reply.output
                if sent is None or output is None or reply.spec.node is None:
                    continue
                if output.finish_reason != "cancelled":  # a cancelled turn does not change its conversation
                    self._lengths[sent.key] = _length_after(output.usage)
                    self._lengths.move_to_end(sent.key)
            while len(self._lengths) > _MAX_ROOTS:
                self._lengths.popitem(last=False)

    # Private; the caller holds the lock

    def _owner(self, key: str) -> str:
        """Return the replica to which the router will send a root, or "" without replicas."""
        return self._rule.home(IncomingTurn(key, key, 0, 0)) if self._rule is not None and self._names else ""

    def _loads(self) -> dict[str, Load]:
        """Return the loads of the replicas that accept turns."""
        sums = {name: [0, 0, 0] for name in self._ready}

        def add(sent: _Sent, num_to_compute: int) -> None:
            row = sums.get(sent.owner)
            if row is not None:
                row[0] += 1
                row[1] += num_to_compute
                row[2] += sent.num_history_tokens + sent.num_tokens

        for reply, sent in self._sent.items():
            if reply.done:  # other turns of its request still run
                continue
            is_elsewhere = reply.num_runs > 1  # its KV cache was lost with a replica
            num_history_tokens = sent.num_history_tokens if is_elsewhere else 0
            add(sent, 0 if reply.has_begun else sent.num_tokens + num_history_tokens)
        until_s = self._now_s() - _PROMISED_S
        while self._promised and next(iter(self._promised.values()))[0] < until_s:
            self._promised.popitem(last=False)
        for _, sent in self._promised.values():
            add(sent, sent.num_tokens)
        return {name: Load(*row) for name, row in sums.items()}


def speeds_of(info: EngineInfo, stats: Mapping[str, Any]) -> Speeds:
    """Estimate a replica's speeds from the model size.

    A step reads the weights once, and each token is multiplied by those that compute it.
    """
    model, cache = info.description["model"], info.description["cache"]
    count = info.description["device"]["count"]
    num_turns, output_tokens = stats.get("num_turns_finished", 0), stats.get("output_tokens", 0)
    return Speeds(
        token_s=2 * model["num_active_parameters"] / (_FLOP_PER_S * count),
        step_s=model["weights_bytes"] / _BYTES_PER_S,
        context_token_s=cache["page_bytes"] / cache["chunk_tokens"] / _BYTES_PER_S,
        output_tokens=output_tokens / num_turns if num_turns else _OUTPUT_TOKENS,
        capacity_tokens=max(cache["gpu_tokens"], 1),
    )


def _length_after(usage: Usage) -> int:
    """Return the tokens of the context after the turn."""
    history = usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens
    return history + usage.prefilled_tokens + usage.output_tokens


def _others(root: str) -> Iterator[str]:
    while True:
        yield new_root()
