"""Starting the turns of a context, again without memory where the engine does not know their parent any more.

Owns: what is tried once an engine says that a turn is gone.
Does not know: HTTP, schemas, or what the turns are for.
Called by: the handlers of Responses, Conversations and Chat Completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.engine.validation import TurnSpec
from pensieve_jax.server.async_engine import AsyncTurn, EngineService
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.threads import aside


async def start_turns(
    engine: EngineService,
    owner: str,
    find: Callable[[Memory], ResolvedContext],
    specs_of: Callable[[ResolvedContext], Sequence[TurnSpec]],
    *,
    is_long: bool,
) -> tuple[ResolvedContext, list[AsyncTurn]]:
    """The turns of a context, accepted by the engine, all of them or none.

    Args:
      engine: where they run.
      owner: whose they are.
      find: resolves the context; which turns it may go on from is narrowed each time that the engine does not
        know the parent that was found.
      specs_of: the turns to submit; several only as siblings, for several replies.
      is_long: whether to resolve the context, past and new, is long work.

    Raises what `find` and the engine raise; UnknownTurnError only where a context is bound to its parent.
    """
    unknown: UnknownTurnError | None = None
    for memory in Memory:
        resolved = await aside(owner, is_long, find, memory)
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
