"""The turns of one call, each in the conversation that it is to run in.

Owns: which turns of a call are choices of one prompt, and what a turn adds to its conversation.
Does not know: how turns run, or whether they may: they were checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.branches import Place
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.prefixes import PrefixTable

type _Choice = tuple[str, str | None, tuple[int, ...]]


class Placed(NamedTuple):
    """The conversation that a turn runs in, and what it was found to go on from, if its caller placed it."""

    live: LiveConversation
    origin: TurnOrigin | None


class Placing:
    """Finds turns their conversations.

    Attributes:
      conversations: in memory and in the history.
    """

    def __init__(self, conversations: ConversationTable, prefixes: PrefixTable, *, stateful: bool) -> None:
        """Among these."""
        self.conversations = conversations
        self._prefixes = prefixes
        self._stateful = stateful

    def each(
        self, specs: Sequence[TurnSpec], places: Sequence[Place | None]
    ) -> Iterator[tuple[TurnSpec, Placed]]:
        """Every turn of a call with where it runs: busy from then on, with its prompt.

        A turn must be queued before the next one is asked for. `places` are what `check_turns` returned.
        """
        num_alike = Counter(_choice(spec, spec.node) for spec in specs if spec.node is not None)
        first: dict[_Choice, Branch] = {}
        for spec, place in zip(specs, places, strict=True):
            if spec.node is None or place is None:
                placed = Placed(self.conversations.get_or_create(spec.conversation_id), None)
            else:
                choice = _choice(spec, spec.node)
                branch, origin = self.conversations.branches.begin(
                    spec.node, place, choice[2], twin=first.get(choice), has_twins=num_alike[choice] > 1
                )
                first.setdefault(choice, branch)
                placed = Placed(branch, origin)
            self._add(spec, placed.live)
            yield spec, placed

    def _add(self, spec: TurnSpec, live: LiveConversation) -> None:
        live.busy = True
        if spec.prefix is not None:
            live.conversation.token_ids += spec.prefix.token_ids
            if self._stateful and not live.sequence.chunks:
                self._prefixes.begin(live.sequence, spec.prefix)
        live.conversation.token_ids += map(int, spec.prompt_token_ids)  # numpy's ints become Python's


def _choice(spec: TurnSpec, node: TurnNode) -> _Choice:
    return node.owner, node.parent_id, tuple(map(int, spec.prompt_token_ids))
