"""Slots of counts over many steps: every turn counts what it counts alone, whatever happens to the others.

The device is simulated in the order of launches, with one step of look-ahead. Turns sit out steps, lose their
slots to others, are cancelled, and steps fail.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding import adjustments
from pensieve_jax.decoding.adjustments import PADDING_CODE, not_counted, penalty_words
from pensieve_jax.scheduler.count_slots import CountSlots
from tests.engine.count_mutations import COUNT_MUTATIONS
from tests.seeds import new_seed

VOCAB_SIZE, NUM_SLOTS, MAX_NUM_TURNS, MAX_LENGTH = 50, 4, 9, 30
SETTINGS = (
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(),
)


def choose(params: SamplingParams, counts: np.ndarray, seen: np.ndarray, key: Sequence[int]) -> int:
    """Return an id that depends on all counts that the parameters ask for."""
    if not params.has_penalties:
        return int(np.random.default_rng(key).integers(VOCAB_SIZE))
    logits = np.random.default_rng(key).normal(size=VOCAB_SIZE) - 0.7 * counts
    if params.repetition_penalty != 1:
        logits -= 0.9 * (seen | (counts > 0))
    return int(logits.argmax())


def alone(number: int, params: SamplingParams, prompt: Sequence[int], length: int) -> list[int]:
    """Return the first ids of a turn by counts of its own ids."""
    seen = np.isin(np.arange(VOCAB_SIZE), prompt)
    ids: list[int] = []
    while len(ids) < length:
        ids.append(choose(params, np.bincount(ids, minlength=VOCAB_SIZE), seen, (number, len(ids))))
    return ids


class Device:
    """Counts in the order of launches; a slot holds anything until it is seeded."""

    def __init__(self) -> None:
        self.counts = np.full((NUM_SLOTS, VOCAB_SIZE), 7)
        self.seen = np.ones((NUM_SLOTS, VOCAB_SIZE), bool)
        self.prev_ids = np.zeros(NUM_SLOTS, int)

    def step(self, rows: Sequence[Any], counted: np.ndarray, seeds: Sequence[np.ndarray]) -> list[int]:
        for words in seeds:
            slot, codes = int(words[0]), words[2:]
            if words[1]:
                self.counts[slot], self.seen[slot] = 0, False
            np.add.at(self.counts[slot], codes[(codes >= 0) & (codes != PADDING_CODE)], 1)
            self.seen[slot, -1 - codes[codes < 0]] = True
        ids = []
        for row, turn in enumerate(rows):
            slot, prev_sample = counted[:2, row].tolist()
            if prev_sample >= 0:
                self.counts[slot, self.prev_ids[prev_sample]] += 1
            number = len(turn.token_ids) - 1 - turn.num_prompt_end
            ids.append(choose(turn.params, self.counts[slot], self.seen[slot], (turn.request_id, number)))
        self.prev_ids = np.array(ids)
        return ids


def new_turn(number: int, rng: random.Random) -> Any:
    """Return what the slots know of a request."""
    params = SETTINGS[number % len(SETTINGS)]
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
    return SimpleNamespace(
        request_id=number,
        params=params,
        penalties=penalty_words(params) if params.has_penalties else None,
        token_ids=list(prompt),
        num_prompt_end=len(prompt),
        sample_row=-1,
    )


def serve(seed: int, num_steps: int = 200) -> tuple[int, int]:
    """Return the number of turns, and how many of them have other ids than alone."""
    rng, device, slots = random.Random(seed), Device(), CountSlots(NUM_SLOTS)
    turns: list[Any] = []
    seen: list[Any] = []
    flying: tuple[list[Any], list[int]] | None = None
    for _ in range(num_steps):
        while len(turns) < MAX_NUM_TURNS:
            turns.append(new_turn(len(seen), rng))
            seen.append(turns[-1])
        if rng.random() < 0.1:
            turns.remove(rng.choice(turns))  # cancelled, perhaps with an id in flight
        # A turn stays in the batch for a while, as the oldest ones are preferred.
        ready = sorted(turns, key=lambda turn: (rng.random() < 0.2, turn.request_id))
        rows = rng.sample(ready[:NUM_SLOTS], NUM_SLOTS)[: rng.choice((1, 3, NUM_SLOTS, NUM_SLOTS))]
        for turn in rows:
            turn.token_ids.append(PENDING_TOKEN)
        ends, counted = [len(turn.token_ids) - 1 for turn in rows], not_counted(NUM_SLOTS)
        seeds = slots.count(rows, ends, counted)
        ids = device.step(rows, counted, seeds)
        for row, turn in enumerate(rows):
            turn.sample_row = row
        if flying is not None:
            for turn, token_id in zip(*flying, strict=True):
                turn.token_ids[turn.token_ids.index(PENDING_TOKEN)] = token_id
        flying = rows, ids
        if rng.random() < 0.03:
            for turn in seen:
                turn.token_ids = [token_id for token_id in turn.token_ids if token_id != PENDING_TOKEN]
            device, flying = Device(), None
            slots.forget()
        turns = [turn for turn in turns if len(turn.token_ids) < turn.num_prompt_end + MAX_LENGTH]
    wrong = 0
    for turn in seen:
        prompt, reply = turn.token_ids[: turn.num_prompt_end], turn.token_ids[turn.num_prompt_end :]
        known = [token_id for token_id in reply if token_id != PENDING_TOKEN]
        wrong += known != alone(turn.request_id, turn.params, prompt, len(known))
    return len(seen), wrong


def test_every_turn_counts_its_own_ids() -> None:
    seeds = [new_seed() + number for number in range(6)]
    assert [serve(seed)[1] for seed in seeds] == [0] * len(seeds)


PLANTED = {name: plant for name, plant in COUNT_MUTATIONS.items() if "mask" not in name}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    try:
        assert any(serve(seed)[1] for seed in range(3))
    except IndexError as error:
        print(f"caught: {error}")


def test_a_slot_is_seeded_only_where_it_lacks_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that stays in the batch needs no program beside the choice."""
    calls: list[int] = []
    seeds = adjustments.seeds
    monkeypatch.setattr(
        adjustments,
        "seeds",
        lambda slot, *ids, clears: calls.append(slot) or seeds(slot, *ids, clears=clears),
    )
    slots, turn = CountSlots(2), new_turn(0, random.Random(0))
    numbers = []
    for step in range(4):
        turn.token_ids.append(PENDING_TOKEN)
        counted = not_counted(2)
        numbers.append(len(slots.count([turn], [len(turn.token_ids) - 1], counted)))
        assert counted[:2, 0].tolist() == [0, 0 if step else -1]
        turn.sample_row = 0
        if step:
            turn.token_ids[-2] = 5
    assert numbers == [1, 0, 0, 0]
