"""The conversations of a restart schedule: a function of a seed, the same in every process.

Owns prompts, sampling parameters, and the set of conversations. Does not know processes, kills, or an engine.
Called by `restart_schedule` and `process`.

A lane is an endless chain of turns; after `TURNS_PER_CONVERSATION` of them a new conversation begins. Two
lanes in three sample: with a seed of the script's, and with one that the library draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pensieve_jax.core.sampling_params import SamplingParams

NUM_LANES = 6
TURNS_PER_CONVERSATION = 4
MAX_PROMPT_TOKENS = 14
MAX_OUTPUT_TOKENS = 12
MAX_CONTEXT_TOKENS = TURNS_PER_CONVERSATION * (MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS)


class TurnKey(NamedTuple):
    """Key of a turn."""

    conversation_id: str
    turn_index: int


@dataclass(frozen=True)
class ScriptedTurn:
    """A turn before it runs; it yields exactly `params.max_tokens` tokens."""

    key: TurnKey
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Script:
    """All conversations of one schedule."""

    seed: int

    def turn(self, key: TurnKey) -> ScriptedTurn:
        """Return the turn with this key."""
        lane, generation = (int(part) for part in key.conversation_id.split("-")[1:])
        rng = np.random.default_rng([self.seed, lane, generation, key.turn_index])
        prompt_ids = rng.integers(3, 256, rng.integers(2, MAX_PROMPT_TOKENS, endpoint=True))
        return ScriptedTurn(
            key,
            tuple(prompt_ids.tolist()),
            SamplingParams(
                max_tokens=int(rng.integers(3, MAX_OUTPUT_TOKENS, endpoint=True)),
                temperature=0.0 if lane % 3 == 0 else 0.9,
                seed=int(rng.integers(2**62)) if lane % 3 == 1 else None,
                ignore_eos=True,
            ),
        )

    def next_keys(self, num_turns: Mapping[str, int]) -> list[TurnKey]:
        """Return the next turn of every lane, given the lengths of the existing conversations."""
        return [self._next_key(lane, num_turns) for lane in range(NUM_LANES)]

    def after(self, key: TurnKey) -> TurnKey:
        """Return the turn that follows another one in its lane."""
        lane, generation = (int(part) for part in key.conversation_id.split("-")[1:])
        if key.turn_index + 1 < TURNS_PER_CONVERSATION:
            return TurnKey(key.conversation_id, key.turn_index + 1)
        return TurnKey(_name(lane, generation + 1), 0)

    def check_prefix(self, keys: Iterable[TurnKey]) -> None:
        """Raise AssertionError unless every lane is complete from its beginning to its last turn."""
        by_lane: dict[int, list[TurnKey]] = {}
        for key in sorted(keys, key=lambda key: (int(key.conversation_id.split("-")[2]), key.turn_index)):
            by_lane.setdefault(int(key.conversation_id.split("-")[1]), []).append(key)
        for lane, found in by_lane.items():
            expected = [TurnKey(_name(lane, 0), 0)]
            while len(expected) < len(found):
                expected.append(self.after(expected[-1]))
            assert found == expected, f"lane {lane} has a hole"

    def _next_key(self, lane: int, num_turns: Mapping[str, int]) -> TurnKey:
        generation = 0
        while num_turns.get(_name(lane, generation), 0) == TURNS_PER_CONVERSATION:
            generation += 1
        return TurnKey(_name(lane, generation), num_turns.get(_name(lane, generation), 0))


def _name(lane: int, generation: int) -> str:
    return f"lane-{lane}-{generation}"
