"""Starting the turns of a context, again without memory where the engine does not know their parent any more.

Owns: what is tried once an engine says that a turn is gone.
Does not know: HTTP, schemas, or what the turns are for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.async_engine import AsyncTurn, EngineService
from pensieve_jax.server.context.resolver import Memory, ResolvedContext

type Think = Callable[[Callable[[Memory], ResolvedContext], Memory], Awaitable[ResolvedContext]]


async def start_turns(
    engine: EngineService,
    find: Callable[[Memory], ResolvedContext],
    specs_of: Callable[[ResolvedContext], Sequence[TurnSpec]],
    *,
    think: Think,
) -> tuple[ResolvedContext, list[AsyncTurn]]:
    """The turns of a context, accepted by the engine, all of them or none.

    Args:
      engine: where they run.
      find: resolves the context; which turns it may go on from is narrowed each time that the engine does not
        know the parent that was found.
      specs_of: the turns to submit; several only as siblings, for several replies.
      think: runs `find` where it keeps nobody else waiting.

    Raises what `find` and the engine raise; UnknownTurnError only where a context is bound to its parent.
    """
    unknown: UnknownTurnError | None = None
    for memory in Memory:
        resolved = await think(find, memory)
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
