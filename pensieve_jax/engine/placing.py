"""The turns of one call, each in the conversation that it is to run in.

Owns: which turns of a call are choices of one prompt, and what a turn adds to its conversation before it runs.
Does not know: how turns run, or whether they may: they were checked.
Called by: `Engine.submit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.engine.branches import Place
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.engine.validation import TurnSpec

type _Choice = tuple[str, str | None, tuple[int, ...]]


class Placing:
    """Places for the turns of a call, to be asked for in order."""

    def __init__(
        self,
        specs: Sequence[TurnSpec],
        places: Sequence[Place | None],
        conversations: ConversationTable,
        prefixes: PrefixTable,
        *,
        stateful: bool,
    ) -> None:
        """`places` are what `check_turns` returned."""
        self._todo = iter(list(zip(specs, places, strict=True)))
        self._conversations = conversations
        self._prefixes = prefixes
        self._stateful = stateful
        self._num_alike = Counter(_choice(spec, spec.node) for spec in specs if spec.node is not None)
        self._first: dict[_Choice, Branch] = {}

    def next(self) -> tuple[LiveConversation, TurnOrigin | None]:
        """Where the next turn runs, busy from here on, with its prompt; what it was found to go on from."""
        spec, place = next(self._todo)
        if spec.node is None or place is None:
            live, origin = self._conversations.get_or_create(spec.conversation_id), None
        else:
            live, origin = self._begin(spec, spec.node, place)
        live.busy = True
        if spec.prefix is not None:
            live.conversation.token_ids += spec.prefix.token_ids
            if self._stateful and not live.sequence.chunks:
                self._prefixes.begin(live.sequence, spec.prefix)
        live.conversation.token_ids += map(int, spec.prompt_token_ids)  # numpy's ints become Python's
        return live, origin

    def _begin(self, spec: TurnSpec, node: TurnNode, place: Place) -> tuple[Branch, TurnOrigin]:
        choice = _choice(spec, node)
        branch, origin = self._conversations.branches.begin(
            node,
            place,
            choice[2],
            twin=self._first.get(choice),
            has_twins=self._num_alike[choice] > 1,
        )
        self._first.setdefault(choice, branch)
        return branch, origin


def _choice(spec: TurnSpec, node: TurnNode) -> _Choice:
    return node.owner, node.parent_id, tuple(map(int, spec.prompt_token_ids))
