"""Starting the turns of a context, again without memory where the engine does not know their parent any more.

Owns: what is tried once an engine says that a turn is gone.
Does not know: HTTP, schemas, or what the turns are for.
Called by: the handlers of Responses, Conversations and Chat Completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.engine.validation import TurnSpec
from pensieve_jax.server.async_engine import AsyncTurn, EngineService
from pensieve_jax.server.context.resolver import Memory, ResolvedContext

INLINE_CHARACTERS = 20_000
"""A longer context is resolved in a thread: tokenizing it would keep the event loop from its clients."""


async def start_turns(
    engine: EngineService,
    find: Callable[[Memory], ResolvedContext],
    specs_of: Callable[[ResolvedContext], Sequence[TurnSpec]],
    *,
    num_characters: int,
) -> tuple[ResolvedContext, list[AsyncTurn]]:
    """The turns of a context, accepted by the engine, all of them or none.

    Args:
      engine: where they run.
      find: resolves the context; which turns it may go on from is narrowed each time that the engine does not
        know the parent that was found.
      specs_of: the turns to submit; several only as siblings, for several replies.
      num_characters: of the whole context.

    Raises what `find` and the engine raise; UnknownTurnError only where a context is bound to its parent.
    """
    unknown: UnknownTurnError | None = None
    for memory in Memory:
        resolved = await resolved_context(find, memory, num_characters=num_characters)
        turns = engine.submit_all(specs_of(resolved))
        try:
            for turn in turns:
                await turn.accepted()
            return resolved, turns
        except UnknownTurnError as error:
            unknown = error
            if resolved.parent is not None:
                resolved.index.forget(resolved.node.owner, resolved.parent.turn_id)
    assert unknown is not None
    raise unknown


async def resolved_context(
    find: Callable[[Memory], ResolvedContext], memory: Memory = Memory.ALL, *, num_characters: int
) -> ResolvedContext:
    """Resolve a context of about so many characters; raises what `find` raises."""
    if num_characters > INLINE_CHARACTERS:
        return await asyncio.to_thread(find, memory)
    return find(memory)
