"""The engine methods that a front end may call by name, with plain values as arguments and results.

Owns: the list of callable methods, and the conversion of results to plain values.
Does not know: sockets or the caller. The engine implements the methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.explanation import DropRecord, Explanation

IN_ORDER: Final = frozenset({"census", "truncate", "fork", "end", "forget_experience"})
"""Calls that wait for the changes before them: those that change the history themselves, and `census`, whose
answer tells a front end that its earlier changes are done."""


def answer(engine: Engine, name: str, arguments: Sequence[Any]) -> Any:
    """Call the method `name` and return its result as plain values.

    Raises the method's errors, and InvalidRequestError for an unknown name or wrong arguments.
    """
    call = CALLS.get(name)
    if call is None:
        raise InvalidRequestError("call", name, f"one of {', '.join(CALLS)}")
    try:
        inspect.signature(call).bind(engine, *arguments)
    except TypeError as error:
        raise InvalidRequestError(f"{name}(...)", list(arguments), "valid arguments", str(error)) from error
    return call(engine, *arguments)


def _stats(engine: Engine) -> dict[str, int | float]:
    """Return the engine's counters and its number of chunks by state."""
    return {**engine.stats(), **engine.census()}


def _explain(engine: Engine, conversation_id: str) -> dict[str, Any]:
    """Return the `Explanation` of a conversation as a dict."""
    return _plain(engine.explain(conversation_id))


def _explain_turn(engine: Engine, owner: str, turn_id: str) -> dict[str, Any]:
    """Return the `Explanation` of the path to a turn as a dict."""
    return _plain(engine.explain_turn(owner, turn_id))


def _plain(explanation: Explanation) -> dict[str, Any]:
    """Convert an explanation; dropped chunks have the name of the reason, its text, and their value."""
    chunks = [
        {**chunk._asdict(), "drop": None if chunk.drop is None else _drop(chunk.drop)}
        for chunk in explanation.chunks
    ]
    return {**explanation._asdict(), "chunks": chunks, "lines": list(explanation.lines)}


def _drop(drop: DropRecord) -> dict[str, Any]:
    return {"at_s": drop.at_s, "reason": drop.reason.name, "why": drop.reason.value, "worth": drop.worth}


def _chunk_map(engine: Engine, owner: str) -> dict[str, Any]:
    """Return an owner's branches from `Engine.chunk_map`, and the total and free pages of both tiers."""
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
    """Return the `ConversationInfo` of every conversation as dicts."""
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
    "explain_turn": _explain_turn,
    "chunk_map": _chunk_map,
    "conversations": _conversations,
}
