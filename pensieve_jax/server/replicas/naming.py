"""Where conversations that begin are sent: a root is named so that it falls on the replica that costs least.

Owns: what a front has sent and not heard the end of, what that makes of each replica's load, and new roots.
Does not know: Ray, messages, or where a turn that has a root goes: the router's ring says that.
Called by: `routed_engine`, which tells of turns; handlers, through the resolver, for roots.

The rule is `balance.NamedRoots`, see docs/balance.md. Loads are of this front's own turns, which it knows to
the token; where there are several fronts, each evens out what it sends itself.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.balance import Asked, Load, NamedRoots, Speeds
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.turn_node import new_root
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.replicas.reply import Reply

_FLOP_PER_S: Final = 4e14
_BYTES_PER_S: Final = 3.5e12
"""Rates of a device, about. Only what they are to one another decides where a conversation goes."""
_OUTPUT_TOKENS: Final = 200.0
"""Of an answer, before any has ended."""
_PROMISED_S: Final = 5.0
"""How long a root counts whose turn has not been sent: its request may have failed in between."""
_MAX_ROOTS: Final = 100_000
"""Conversations whose length is remembered; longer ones cost their replica more."""


class RootNames:
    """Names for roots, by what every replica has to do. Safe to share by threads."""

    def __init__(self, hash_key: Callable[[str], int], now_s: Callable[[], float] = time.monotonic) -> None:
        """`hash_key`: the router's."""
        self._lock = threading.Lock()
        self._hash_key, self._now_s = hash_key, now_s
        self._rule: NamedRoots | None = None
        self._names: frozenset[str] = frozenset()
        self._ready: frozenset[str] = frozenset()
        self._replies: dict[Reply, str] = {}
        self._promised: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def see(
        self, replicas: Mapping[str, bool], info: EngineInfo, stats: Mapping[str, Any] | None = None
    ) -> None:
        """These replicas there are, of which those marked take turns; `stats` are of all of them together."""
        speeds = speeds_of(info, stats or {})
        with self._lock:
            self._ready = frozenset(name for name, is_ready in replicas.items() if is_ready)
            if self._rule is None:
                self._rule = NamedRoots(speeds, hash_key=self._hash_key, other_names=_others)
            self._rule.speeds = speeds
            if self._names != replicas.keys():  # a ring is made of a hundred hashes for each
                self._names = frozenset(replicas)
                self._rule.set_members(self._names)

    def new_root(self, num_tokens: int) -> str:
        """The root of a conversation whose first prompt has about so many tokens."""
        root = new_root()
        with self._lock:
            if self._rule is None or len(self._ready) < 2:
                return root
            asked = Asked(root, root, num_tokens, 0)
            named = self._rule.name(asked, self._loads(self._rule))
            self._promised[named] = self._now_s(), num_tokens
        return named

    def sent(self, key: str, replies: Sequence[Reply]) -> None:
        """Turns of one root are on their way."""
        with self._lock:
            self._promised.pop(key, None)
            self._replies |= dict.fromkeys(replies, key)

    def ended(self, replies: Iterable[Reply]) -> None:
        """Turns that were sent have ended somehow."""
        with self._lock:
            for reply in replies:
                key = self._replies.pop(reply, None)
                if key is not None and reply.output is not None and reply.spec.node is not None:
                    self._lengths[key] = _length_after(reply.output.usage)
                    self._lengths.move_to_end(key)
            while len(self._lengths) > _MAX_ROOTS:
                self._lengths.popitem(last=False)

    def _loads(self, rule: NamedRoots) -> dict[str, Load]:
        """Of replicas that take turns."""
        loads = dict.fromkeys(self._ready, Load())

        def add(key: str, num_tokens: int, num_history_tokens: int, num_to_compute: int) -> None:
            asked = Asked(key, key, num_tokens, num_history_tokens)
            name = rule.home(asked)
            if name in loads:
                loads[name] = loads[name].with_turn(asked, num_to_compute)

        for reply, key in self._replies.items():
            num_tokens = reply.spec.num_new_tokens
            add(key, num_tokens, self._lengths.get(key, 0), 0 if reply.has_begun else num_tokens)
        until_s = self._now_s() - _PROMISED_S
        while self._promised and next(iter(self._promised.values()))[0] < until_s:
            self._promised.popitem(last=False)
        for key, (_, num_tokens) in self._promised.items():
            add(key, num_tokens, 0, num_tokens)
        return loads


def speeds_of(info: EngineInfo, stats: Mapping[str, Any]) -> Speeds:
    """What a replica can do, by its model's size: weights are read for a step, and multiplied for a token."""
    model, cache = info.description["model"], info.description["cache"]
    count = info.description["device"]["count"]
    num_turns, output_tokens = stats.get("num_turns_finished", 0), stats.get("output_tokens", 0)
    return Speeds(
        token_s=2 * model["num_parameters"] / (_FLOP_PER_S * count),
        step_s=model["weights_bytes"] / _BYTES_PER_S,
        context_token_s=cache["page_bytes"] / cache["chunk_tokens"] / _BYTES_PER_S,
        output_tokens=output_tokens / num_turns if num_turns else _OUTPUT_TOKENS,
        capacity_tokens=max(cache["gpu_tokens"], 1),
    )


def _length_after(usage: Usage) -> int:
    """Tokens of the context once the turn had ended."""
    history = usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens
    return history + usage.prefilled_tokens + usage.output_tokens


def _others(root: str) -> Iterator[str]:
    while True:
        yield new_root()
