"""What a front may ask of an engine besides turns, by name, with plain values both ways.

Owns: the list of what may be called, and how results become plain.
Does not know: sockets, or who asks. The calls themselves are the engine's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.engine.engine import Engine


def answer(engine: Engine, name: str, arguments: Sequence[Any]) -> Any:
    """What the call returned, as plain values; raises what it raised, and InvalidRequestError for none."""
    call = CALLS.get(name)
    if call is None:
        raise InvalidRequestError("call", name, f"one of {', '.join(CALLS)}")
    try:
        inspect.signature(call).bind(engine, *arguments)
    except TypeError as error:
        raise InvalidRequestError(f"{name}(...)", list(arguments), "its arguments", str(error)) from error
    return call(engine, *arguments)


def _stats(engine: Engine) -> dict[str, int | float]:
    """Counters, and chunks by state."""
    return {**engine.stats(), **engine.census()}


def _explain(engine: Engine, conversation_id: str) -> dict[str, Any]:
    """`Explanation` by field; `chunks` with what was dropped with reason and worth."""
    found = engine.explain(conversation_id)
    chunks = [
        {**chunk._asdict(), "drop": None if chunk.drop is None else _drop(chunk.drop)}
        for chunk in found.chunks
    ]
    return {**found._asdict(), "chunks": chunks, "lines": list(found.lines)}


def _drop(drop: Any) -> dict[str, Any]:
    return {"at_s": drop.at_s, "reason": drop.reason.name, "worth": drop.worth}


def _chunk_map(engine: Engine, owner: str) -> dict[str, Any]:
    """An owner's branches, as `Engine.chunk_map` tells them, and how full both tiers are."""
    if not isinstance(owner, str):
        raise InvalidRequestError("owner", owner, "a string")
    stats = engine.stats()
    return {
        "chunk_tokens": engine.cache.chunk_tokens,
        "gpu_pages": stats["num_gpu_pages"],
        "free_gpu_pages": stats["num_free_gpu_pages"],
        "cpu_pages": stats["num_cpu_pages"],
        "free_cpu_pages": stats["num_free_cpu_pages"],
        "branches": [branch._asdict() for branch in engine.chunk_map(owner)],
    }


def _conversations(engine: Engine) -> list[dict[str, Any]]:
    """`ConversationInfo` of every conversation by field."""
    names = ("conversation_id", "num_tokens", "num_turns", "last_active_s")
    return [{name: getattr(info, name) for name in names} for info in engine.conversations.listing()]


CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "stats": _stats,
    "census": Engine.census,
    "distributions": Engine.distributions,
    "push_out": Engine.push_out,
    "push_out_turn": Engine.push_out_turn,
    "forget_state": Engine.forget_state,
    "forget_turn_state": Engine.forget_turn_state,
    "forget_experience": Engine.forget_experience,
    "truncate": Engine.truncate,
    "fork": Engine.fork,
    "end": Engine.end,
    "explain": _explain,
    "chunk_map": _chunk_map,
    "conversations": _conversations,
}
