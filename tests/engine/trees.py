"""Turns of trees through an observed engine, checked against the reference; the base of branch tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve_jax.cache import CachedSequence
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history.server_tables.changes import DeleteResponse, ResponseDraft
from tests.engine.harness import Harness
from tests.engine.oracles import TurnFacts


@dataclass(frozen=True)
class Sent:
    """A turn that was sent, and the facts that determine it."""

    turn: Turn
    node: TurnNode
    facts: TurnFacts


class Forest:
    """Trees of turns in one engine.

    Attributes:
        tokens: of the context up to and including an answered turn, by its id.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.engine = harness.engine
        self.tokens: dict[str, tuple[int, ...]] = {}

    def facts(
        self,
        parent: str | None,
        prompt: Sequence[int],
        seed: int = 0,
        *,
        keep: int | None = None,
        **params: object,
    ) -> TurnFacts:
        """Return the facts that determine a turn after `parent`, or after its first `keep` tokens."""
        path = () if parent is None else self.tokens[parent]
        history, replaced = path[:keep], () if keep is None else path[keep:]
        parameters = SamplingParams(**{"ignore_eos": True, "seed": seed, "max_tokens": 8} | params)
        return TurnFacts(
            history, tuple(prompt), parameters, seed, self.harness.max_context_tokens, replaced=replaced
        )

    def send(
        self,
        parent: str | None = None,
        prompt: Sequence[int] | int = 40,
        *,
        seed: int = 0,
        number: int = 1,
        owner: str = "ann",
        durable: bool = True,
        is_response: bool = False,
        keep: int | None = None,
        **params: object,
    ) -> list[Sent]:
        """Queue a turn, or several choices of one; `is_response` attaches a response to each."""
        if isinstance(prompt, int):
            prompt = self.harness.prompt(prompt, seed)
        sent, specs = [], []
        for choice in range(number):
            facts = self.facts(parent, prompt, seed + choice, keep=keep, **params)
            turn_id = new_turn_id(parent)
            draft = None
            if is_response:
                draft = ResponseDraft(
                    response_id=f"resp_{turn_id}",
                    owner=owner,
                    request="{}",
                    input_items="[]",
                    output_item_id=f"msg_{turn_id}",
                    created_at_s=0.0,
                    expires_at_s=1e12,
                )
            node = TurnNode(turn_id=turn_id, parent_id=parent, owner=owner, durable=durable, attachment=draft)
            specs.append(TurnSpec(facts.prompt, facts.params, node=node, keep=keep))
            sent.append((node, facts))
        turns = self.harness.submit_all(specs)
        return [Sent(turn, node, facts) for turn, (node, facts) in zip(turns, sent, strict=True)]

    def settle(self, *sent: Sent) -> list[str]:
        """Run turns to their ends, check them against the reference, and return their ids."""
        outputs = self.harness.run(*(one.turn for one in sent))
        for one, output in zip(sent, outputs, strict=True):
            self.check(one, output.token_ids)
        return [one.node.turn_id for one in sent]

    def check(self, sent: Sent, token_ids: Sequence[int]) -> None:
        """Record and check the tokens of a turn's answer."""
        self.harness.bench.check_tokens(sent.facts, token_ids, whole=True)
        self.tokens[sent.node.turn_id] = (*sent.facts.history, *sent.facts.prompt, *token_ids)

    def turn(self, parent: str | None = None, prompt: Sequence[int] | int = 40, **more: object) -> str:
        """Send a turn, run it to its end, and return its id."""
        return self.settle(*self.send(parent, prompt, **more))[0]

    def delete(self, turn_id: str, owner: str = "ann") -> None:
        """Delete the response of a turn."""
        self.engine.apply(DeleteResponse(owner=owner, response_id=f"resp_{turn_id}"))
        self.engine.check_integrity()

    def sequence(self, turn_id: str, owner: str = "ann") -> CachedSequence:
        """Return the sequence of a branch that contains a turn."""
        return self.engine.conversations.branches.at(owner, turn_id)[0].sequence
