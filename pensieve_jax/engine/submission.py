"""Submission of turns: either all turns of a call become requests, or none.

Owns: the path of a turn from its check to the ledger. It decides which turns of a call are choices of one
prompt, which conversation each runs in, and which tokens it adds to that conversation.
Does not know: steps, or how a turn ends.
Called by the engine.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.branches import TurnPosition
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.drafting import MAX_RELATED
from pensieve_jax.engine.late_rows import JoinedRows, LateRow
from pensieve_jax.engine.ledger import TurnLedger
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.option_rows import option_rows
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.engine.turn import ReplyState, Turn
from pensieve_jax.engine.validation import check_turns
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.grammar import Grammar, Grammars
from pensieve_jax.text.replies import banned_ids

type _Choice = tuple[str, str | None, tuple[int, ...], int | None, int]


class TurnSubmitter:
    """The submission of turns to one engine: it checks, places and queues all turns of a call, or none."""

    def __init__(
        self,
        loop: EngineLoop[Any],
        ledger: TurnLedger,
        placer: TurnPlacer,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None,
    ) -> None:
        """Submit into `loop` and `ledger`."""
        self._grammars = grammars
        self._loop = loop
        self._ledger = ledger
        self._placer = placer
        self._limits = limits
        self._tokenizer = tokenizer

    def submit(self, specs: Sequence[TurnSpec], compiled: Mapping[StructuredOutput, Grammar]) -> list[Turn]:
        """Queue turns in order; with nothing queued on errors. `compiled` has grammars of their forms.

        Raises the errors of `check_turns`, `option_rows` and `Grammars.compile`, and HistoryError.
        """
        places = check_turns(specs, self._limits, self._placer.conversations, self._tokenizer)
        rows = [self._late_row(spec, compiled) for spec in specs]
        turns: list[Turn] = []
        try:
            for (spec, placed), row in zip(self._placer.each(specs, places), rows, strict=True):
                turns.append(self._queue(spec, placed, row))
        except PensieveError:
            for turn in turns:
                self._ledger.cancel(turn.reply)
            raise
        return turns

    def _late_row(self, spec: TurnSpec, compiled: Mapping[StructuredOutput, Grammar]) -> LateRow | None:
        """Return the masks of a new turn, or None."""
        params, limits, tokenizer = spec.params, self._limits, self._tokenizer
        ending_ids = params.ending_ids(limits.eos_token_ids)
        banned = banned_ids(spec.template_input, tokenizer)
        rows = option_rows(params, tokenizer, limits.vocab_size, ending_ids, banned)
        if params.structured is not None and self._grammars is not None:
            grammar = compiled.get(params.structured) or self._grammars.compile(params.structured)
            rows.append(grammar.row(ending_ids, params.min_tokens))
        return JoinedRows(rows) if rows else None

    def _queue(self, spec: TurnSpec, placed: PlacedTurn, row: LateRow | None) -> Turn:
        params = spec.params
        request = self._loop.submit(
            placed.live.conversation,
            placed.live.sequence,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            ending_ids=params.ending_ids(self._limits.eos_token_ids),
            max_context_tokens=self._limits.max_context_tokens,
        )
        rest = spec.messages, spec.node, placed.origin, spec.template_input
        try:
            reply = ReplyState(request, self._tokenizer, *rest)
        except PensieveError:
            # The request is queued and its conversation is busy, so undo both by cancelling the turn.
            self._ledger.cancel(self._ledger.enter(ReplyState(request, None, *rest)).reply)
            raise
        return self._ledger.enter(reply, row, lambda: self._placer.beside(placed.live))


class TurnPlacer:
    """The choice of a conversation for each turn.

    Attributes:
      conversations: conversations in memory and in the history.
    """

    def __init__(self, conversations: ConversationTable, prefixes: PrefixTable, *, stateful: bool) -> None:
        self.conversations = conversations
        self._prefixes = prefixes
        self._stateful = stateful

    def each(
        self, specs: Sequence[TurnSpec], places: Sequence[TurnPosition | None]
    ) -> Iterator[tuple[TurnSpec, PlacedTurn]]:
        """Yield every turn of a call with its conversation, marked as busy and ending with the prompt.

        The caller must queue each turn before it takes the next one. `places` is the result of `check_turns`.
        """
        choices = [_choice(spec, spec.node, i) for i, spec in enumerate(specs) if spec.node is not None]
        num_alike = Counter(choices)
        first: dict[_Choice, Branch] = {}
        for i, (spec, place) in enumerate(zip(specs, places, strict=True)):
            if spec.node is None or place is None:
                placed = PlacedTurn(self.conversations.get_or_create(spec.conversation_id), None)
                self._replace(spec, placed.live)
            else:
                choice = _choice(spec, spec.node, i)
                twin = first.get(choice)
                branches = self.conversations.branches
                branch, origin = branches.begin(spec.node, place, choice[2], twin=twin, keep=spec.keep)
                if origin.kind == "extended":
                    self._replace(spec, branch)
                if twin is None and num_alike[choice] > 1:
                    branches.prepare_twins(branch, len(choice[2]))
                first.setdefault(choice, branch)
                placed = PlacedTurn(branch, origin)
            self._add(spec, placed.live)
            yield spec, placed

    def beside(self, live: LiveConversation) -> list[list[int]]:
        """Return ids of other branches of a conversation, as drafts may come from them."""
        if not isinstance(live, Branch):
            return []
        return self.conversations.branches.tails_beside(live, MAX_RELATED)

    def _replace(self, spec: TurnSpec, live: LiveConversation) -> None:
        if spec.keep is not None and spec.keep < live.conversation.num_history_tokens:
            self.conversations.replace_from(live, spec.keep)

    def _add(self, spec: TurnSpec, live: LiveConversation) -> None:
        live.busy = True
        if spec.prefix is not None:
            live.conversation.token_ids += spec.prefix.token_ids
            scores_it = spec.params.prompt_logprobs is not None
            if self._stateful and not live.sequence.chunks and not scores_it:
                self._prefixes.begin(live.sequence, spec.prefix)
        live.conversation.token_ids += map(int, spec.prompt_token_ids)  # converts numpy integers


class PlacedTurn(NamedTuple):
    """The conversation that a turn runs in, and the origin of a turn with a node."""

    live: LiveConversation
    origin: TurnOrigin | None


def _choice(spec: TurnSpec, node: TurnNode, index: int) -> _Choice:
    """Return what is equal for turns that share their prompt; a turn that scores its prompt shares none."""
    own = -1 if spec.params.prompt_logprobs is None else index
    return node.owner, node.parent_id, tuple(map(int, spec.prompt_token_ids)), spec.keep, own
