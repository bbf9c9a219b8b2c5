"""How a turn's tokens are chosen and when it ends.

Owns: `SamplingParams`, its limits that need no model, and the banned/stopping ids they amount to.
Does not know: the vocabulary or the context length; the engine checks those when a turn is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import is_utf8

MAX_SEED = 2**63 - 1
# Every stop string is looked for in every token's text, between two steps of everybody's engine.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024


def _check_number(name: str, value: Any, low: float, high: float, limit: str) -> None:
    """Refuse what is no number, NaN, infinite or outside [low, high]."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # Compared before anything else: NaN fails, and an int may be too large for a float.
    if not is_number or not low <= value <= high:
        raise InvalidRequestError(name, value, limit)


def _check_int(name: str, value: object, low: int, high: int, limit: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(name, value, limit or f"an integer from {low} to {high}")


def _check_size(name: str, value: Sized, most: int, what: str) -> None:
    if len(value) > most:
        raise InvalidRequestError(name, f"{len(value)} {what}", f"at most {most} {what}")


def _is_text(stop: str) -> bool:
    """Whether a reply can ever say it."""
    return stop != "" and is_utf8(stop)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one turn.

    A sampled turn is a function of (seed, absolute position, logits): it does not depend on the batch it
    ran in, on evictions or on restarts.

    Attributes:
      max_tokens: the most tokens of the reply; the turn then ends with "length".
      min_tokens: the first so many tokens of a reply do not end it: end-of-sequence and stop ids are not
        sampled, and a stop string that they complete is text.
      temperature: 0 is greedy.
      top_k: sample among the k most likely ids; 0 is off.
      top_p: sample among the most likely ids whose probabilities add up to this; 1 is off.
      seed: None draws one, which is stored with the turn.
      stop: strings that end the reply, at most 16 of 1,024 characters; the text ends before them. What was
        sampled of them stays where a conversation goes on; a server's chats are written anew behind the text.
        Kept as a tuple.
      stop_token_ids: ids that end the reply, as the model's end-of-sequence does; at most 1,024.
        Kept as a tuple.
      ignore_eos: True goes on past the model's end-of-sequence, as benchmarks do; a chat ends there.
      logprobs: None for none, 0 for those of the chosen tokens, k for the k most likely as well.
    """

    max_tokens: int = 32
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = field(default_factory=tuple)
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError`, naming the field, on what cannot work."""
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_number("temperature", self.temperature, 0.0, 1e4, "a finite number from 0 to 10000")
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1")
        for name in ("temperature", "top_p"):
            # A number of NumPy or a fraction: JSON and the way to another process have ints and floats only.
            if type(getattr(self, name)) not in (int, float):
                object.__setattr__(self, name, float(getattr(self, name)))
        if self.top_p == 0:
            raise InvalidRequestError("top_p", self.top_p, "a number above 0 and at most 1")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            # How many there may be at most is the engine's, which checks it.
            limit = "an integer from 0 to what the engine has room for (max_logprobs)"
            _check_int("logprobs", self.logprobs, 0, 2**31 - 1, limit)
        is_list = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not is_list or not all(isinstance(stop, str) and _is_text(stop) for stop in self.stop):
            raise InvalidRequestError("stop", self.stop, "a list of non-empty strings that UTF-8 can hold")
        _check_size("stop", self.stop, MAX_STOP_STRINGS, "strings")
        for string in self.stop:
            _check_size("stop", string, MAX_STOP_CHARACTERS, "characters in a string")
        if not isinstance(self.stop_token_ids, Sequence):
            raise InvalidRequestError("stop_token_ids", self.stop_token_ids, "a list of ids")
        _check_size("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids")
        # Whoever is given these relies on the checks, and the caller may change its lists.
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for i, token_id in enumerate(self.stop_token_ids):
            _check_int(f"stop_token_ids[{i}]", token_id, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos", self.ignore_eos, "True or False")

    def ending_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end a reply, for a model with these end-of-sequence ids."""
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*self.stop_token_ids, *eos)))
