"""How a turn's tokens are chosen and when it ends: `SamplingParams`, and the table of its fields.

Owns: the parameters, their limits that need no model, and the banned or stopping ids that follow from them.
The table is the metadata of the fields. From it follow checks, documentation, command-line flags, the columns
of a step's plan, defaults from a model's files, and what the server's routes accept or refuse.
Does not know: the vocabulary or the context length; the engine checks those when a turn is submitted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Final, NamedTuple

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import KEY, Limit, OptionRow, documented, is_utf8, options_of
from pensieve_jax.core.structured import StructuredOutput

MAX_SEED = 2**63 - 1
# Every stop string is searched in every token's text between two steps, which delays all turns of the engine.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # as many as large vocabularies have
MAX_BIASED_IDS = 300
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 1024
_MAX_INT = 2**31 - 1
_TABLE_KEY: Final = "sampling"

COMPLETIONS, RESPONSES, MESSAGES = "completions", "responses", "messages"
ROUTES: Final = (COMPLETIONS, RESPONSES, MESSAGES)
"""The server's routes for sampling fields: Chat Completions and Completions together, Responses, and the
Messages of Anthropic's API."""


class Column(NamedTuple):
    """A field in a row of a step: one word of 32 bits.

    Attributes:
      dtype: dtype of the word, as numpy names it: "<f4" or "<i4".
      off: value for rows that do not use the field, and for padding.
    """

    dtype: str
    off: float


class SamplingField(NamedTuple):
    """A row of the table, in addition to what `options_of(SamplingParams)` has.

    Attributes:
      column: the field's column in a step's plan; None if the plan does not have the field.
      penalty: the field's column in the arrays beside a plan, which only steps with penalties have; None
        for other fields.
      routes: those of `ROUTES` that accept the field under this name; others refuse every value but its
        default. None if each route has its own form of the field.
      flag: help text of the flag; "" without a flag.
      adjusts: whether it changes logits before the choice, which padded batches do not support.
      is_model_default: whether a model's generation_config.json may set it for requests that omit it.
    """

    column: Column | None = None
    penalty: Column | None = None
    routes: tuple[str, ...] | None = ROUTES
    flag: str = ""
    adjusts: bool = False
    is_model_default: bool = False


def sampling_field(default: Any, limit: Limit, help: str, table: SamplingField) -> Any:
    """Return a field of `SamplingParams` with its default, limit, help text and table row."""
    metadata = {KEY: OptionRow(limit, help, ""), _TABLE_KEY: table}
    if default == ():
        return field(default_factory=tuple, metadata=metadata)
    if default == {}:  # a mapping has no hash; equality compares it
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _integer(low: int, high: int, words: str | None = None) -> Limit:
    return Limit(
        words or f"an integer from {low} to {high}",
        lambda value: _is_int(value, low, high),
        must_be_stated=words is not None,
    )


def _real(low: float, high: float, words: str) -> Limit:
    """Return the limit of numbers in [low, high]; NaN is not among them."""

    def accepts(value: Any) -> bool:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        # Compare before converting: NaN fails, and an int may be too large for a float.
        return is_number and bool(low <= value <= high)

    return Limit(words, accepts)


def _is_repetition_penalty(value: Any) -> bool:
    return _real(0.0, 10.0, "").accepts(value) and value > 0


def _none_or(limit: Limit) -> Limit:
    return limit._replace(accepts=lambda value: value is None or limit.accepts(value))


def _check_size(name: str, value: Sized, max_size: int, what: str) -> None:
    if len(value) > max_size:
        raise InvalidRequestError(name, f"{len(value)} {what}", f"at most {max_size} {what}")


def _is_text(stop: object) -> bool:
    """Return whether a reply can ever contain this string."""
    return isinstance(stop, str) and stop != "" and is_utf8(stop)


def _are_strings(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_text, value))


def _are_ids(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_FLOAT, _INT = "<f4", "<i4"


@documented
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one turn.

    A sampled turn is a function of (seed, absolute position, logits, its own ids). It does not depend on the
    batch that it ran in, on evictions or on restarts.

    The options change a choice in this order: repetition, frequency and presence penalties, `logit_bias`,
    masks of ids (`allowed_token_ids`, `bad_words`, `min_tokens`), `temperature`, `min_p`, `top_k`, `top_p`.
    Log-probabilities are those of the model, before all of them.
    """

    max_tokens: int = sampling_field(
        32,
        _integer(0, _MAX_INT),
        'Maximum number of reply tokens; a turn that reaches it ends with "length". With 0, it computes only '
        "the prompt.",
        SamplingField(routes=None, flag="Maximum number of reply tokens."),
    )
    min_tokens: int = sampling_field(
        0,
        _integer(0, _MAX_INT),
        "The first `min_tokens` tokens do not end a reply: end-of-sequence and stop ids are not sampled, and "
        "a stop string completed by them is ordinary text.",
        SamplingField(routes=(COMPLETIONS,), flag="Replies do not end before this many tokens."),
    )
    temperature: float = sampling_field(
        0.0,
        _real(0.0, 1e4, "a finite number from 0 to 10000"),
        "Sampling temperature; 0 is greedy.",
        SamplingField(Column(_FLOAT, 0), flag="Sampling temperature; 0 is greedy.", is_model_default=True),
    )
    top_k: int = sampling_field(
        0,
        _integer(-1, _MAX_INT),
        "Sample among the k most likely ids; 0 is off, and so is -1, which is stored as 0.",
        SamplingField(
            Column(_INT, 0), flag="Sample among the k most likely ids; 0 is off.", is_model_default=True
        ),
    )
    top_p: float = sampling_field(
        1.0,
        _real(0.0, 1.0, "a number from 0 to 1"),
        "Sample among the most likely ids whose probabilities add up to this; 1 is off, and so is 0, which "
        "is stored as 1.",
        SamplingField(
            Column(_FLOAT, 1),
            flag="Sample among the most likely ids whose probabilities add up to this; 1 is off.",
            is_model_default=True,
        ),
    )
    min_p: float = sampling_field(
        0.0,
        _real(0.0, 1.0, "a number from 0 to 1"),
        "Sample among the ids whose probability is at least this share of the most likely one's; 0 is off. "
        "Applies before top_k and top_p.",
        SamplingField(
            Column(_FLOAT, 0),
            routes=(COMPLETIONS,),
            flag="Sample among ids at least this share as likely as the most likely one; 0 is off.",
            is_model_default=True,
        ),
    )
    repetition_penalty: float = sampling_field(
        1.0,
        Limit("a number above 0, up to 10", _is_repetition_penalty),
        "Divides the positive logits of ids that the context or the reply has, and multiplies their negative "
        "ones; 1 is off.",
        SamplingField(
            routes=(COMPLETIONS, RESPONSES),
            penalty=Column(_FLOAT, 1),
            adjusts=True,
            flag="Factor against ids that the context or the reply has; 1 is off.",
            is_model_default=True,
        ),
    )
    frequency_penalty: float = sampling_field(
        0.0,
        _real(-2.0, 2.0, "a number from -2 to 2"),
        "Subtracted from the logit of an id once for each time that the reply has it; 0 is off.",
        SamplingField(
            routes=(COMPLETIONS, RESPONSES),
            penalty=Column(_FLOAT, 0),
            adjusts=True,
            flag="Subtracted from an id's logit for each occurrence in the reply.",
        ),
    )
    presence_penalty: float = sampling_field(
        0.0,
        _real(-2.0, 2.0, "a number from -2 to 2"),
        "Subtracted from the logits of ids that the reply has; 0 is off.",
        SamplingField(
            routes=(COMPLETIONS, RESPONSES),
            penalty=Column(_FLOAT, 0),
            adjusts=True,
            flag="Subtracted from the logits of ids that the reply has.",
        ),
    )
    logit_bias: Mapping[int, float] = sampling_field(
        {},
        Limit("a mapping of ids to numbers", lambda value: isinstance(value, Mapping), must_be_stated=False),
        "Added to the logits of ids: at most 300 ids, each with a number from -100 to 100.",
        SamplingField(routes=(COMPLETIONS, RESPONSES), adjusts=True),
    )
    allowed_token_ids: Sequence[int] | None = sampling_field(
        None,
        Limit(
            "a list of at least one id",
            lambda value: value is None or (_are_ids(value) and len(value) > 0),
            must_be_stated=False,
        ),
        "The only ids that may be sampled; None allows all. Stored as a tuple.",
        SamplingField(routes=(COMPLETIONS,), adjusts=True),
    )
    bad_words: Sequence[str] = sampling_field(
        (),
        Limit("a list of non-empty strings that UTF-8 can hold", _are_strings, must_be_stated=False),
        "Texts that are not sampled, at most 64 of 1,024 characters. The last token of a text is banned "
        "behind its other tokens, as the tokenizer writes the text with and without a space before it. "
        "Stored as a tuple.",
        SamplingField(routes=(COMPLETIONS,), adjusts=True, flag="A text that is not sampled."),
    )
    seed: int | None = sampling_field(
        None,
        _none_or(_integer(0, MAX_SEED)),
        "Seed of a sampled turn. None draws one, which is stored with the turn.",
        SamplingField(flag="Seed of sampled turns; default: a new one for each."),
    )
    stop: Sequence[str] = sampling_field(
        (),
        Limit("a list of non-empty strings that UTF-8 can hold", _are_strings, must_be_stated=False),
        "Strings that end the reply, at most 16 of 1,024 characters. The text ends before the stop string. "
        "It may have the spelling of a control token, which no text shows. A conversation keeps the tokens "
        "sampled for it; a server's chat is rendered again from the text. Stored as a tuple.",
        SamplingField(routes=(COMPLETIONS,), flag="A string that ends the reply."),
    )
    stop_token_ids: Sequence[int] = sampling_field(
        (),
        Limit("a list of ids", lambda value: isinstance(value, Sequence), must_be_stated=False),
        "Ids that end the reply, as the model's end-of-sequence does; at most 1,024. Stored as a tuple.",
        SamplingField(routes=(COMPLETIONS,)),
    )
    include_stop_str_in_output: bool = sampling_field(
        False,
        Limit("True or False", lambda value: isinstance(value, bool), must_be_stated=False),
        "True ends the text behind the stop string instead of before it.",
        SamplingField(routes=(COMPLETIONS,), flag="Let the text include the stop string."),
    )
    ignore_eos: bool = sampling_field(
        False,
        Limit("True or False", lambda value: isinstance(value, bool), must_be_stated=False),
        "True continues past the model's end-of-sequence, as benchmarks do; a chat ends there.",
        SamplingField(routes=(COMPLETIONS,), flag="Continue past the end of sequence."),
    )
    logprobs: int | None = sampling_field(
        None,
        # The engine checks the maximum, which it configures.
        _none_or(_integer(0, _MAX_INT, "an integer from 0 to what the engine has room for (max_logprobs)")),
        "None for none, 0 for those of the chosen tokens, k for the k most likely as well.",
        SamplingField(routes=None),
    )
    prompt_logprobs: int | None = sampling_field(
        None,
        _none_or(_integer(0, _MAX_INT, "an integer from 0 to what the engine has room for (max_logprobs)")),
        "None for none, 0 for those of the prompt's tokens, k for the k most likely as well. The turn then "
        "computes every position of its prompt, and reuses the KV cache of earlier turns only.",
        SamplingField(routes=(COMPLETIONS,)),
    )

    structured: StructuredOutput | None = sampling_field(
        None,
        Limit(
            "None or a StructuredOutput",
            lambda value: value is None or isinstance(value, StructuredOutput),
            must_be_stated=False,
        ),
        "The form that the reply must have, such as a JSON schema. The reply ends where the form is "
        "complete, and `min_tokens` gives way there; a limit or a stop string can cut it. Not with "
        "`ignore_eos`.",
        SamplingField(routes=None),
    )

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError`, naming the field, for values that cannot be used."""
        for name, default, limit, is_real in _checks():
            value = getattr(self, name)
            # Most fields of most requests have their default, which needs no check.
            if value is default or (type(value) is type(default) and value == default):
                continue
            if not limit.accepts(value):
                raise InvalidRequestError(name, value, limit.words)
            # A NumPy number or a Fraction, say: JSON and the other process only accept int and float.
            if is_real and type(value) not in (int, float):
                object.__setattr__(self, name, float(value))
        # vLLM's way to switch these off; a model's files have them, too. Later code knows one value each.
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.top_p == 0:
            object.__setattr__(self, "top_p", 1.0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", self.min_tokens, f"an integer from 0 to {self.max_tokens}"
            )
        if self.structured is not None and self.ignore_eos:
            raise InvalidRequestError("ignore_eos", True, "False with structured, whose form ends the reply")
        # Later code relies on the checks, and the caller may change its lists.
        if self.stop != ():
            strings = _checked_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
            object.__setattr__(self, "stop", strings)
        if self.bad_words != ():
            strings = _checked_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
            object.__setattr__(self, "bad_words", strings)
        if self.stop_token_ids != ():
            ids = _checked_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
            object.__setattr__(self, "stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            ids = _checked_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            object.__setattr__(self, "allowed_token_ids", ids)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias) if self.logit_bias else {})

    def check_in_use(self, refuses: Callable[[SamplingField], bool], reason: str, hint: str) -> None:
        """Raise InvalidRequestError for the first field in use whose row of the table `refuses` it."""
        for option in options_of(SamplingParams):
            default = option.default() if isinstance(option.default, type) else option.default
            value = getattr(self, option.name)
            if value != default and refuses(sampling_table()[option.name]):
                raise InvalidRequestError(option.name, value, f"{default!r}: {reason}", hint)

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on counts of the turn's ids."""
        return any([getattr(self, name) != column.off for name, column in penalty_columns().items()])

    def ending_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that end a reply, for a model with these end-of-sequence ids."""
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*self.stop_token_ids, *eos)))


@functools.cache
def _checks() -> tuple[tuple[str, Any, Limit, bool], ...]:
    """Return name, default and limit of all fields, and whether it is a real number.

    These are plain tuples, which are unpacked faster than named ones.
    """
    return tuple(
        (one.name, () if one.default is tuple else one.default, one.limit, one.kind is float)
        for one in options_of(SamplingParams)
    )


def _checked_strings(name: str, strings: Sequence[str], max_size: int, max_length: int) -> tuple[str, ...]:
    _check_size(name, strings, max_size, "strings")
    for string in strings:
        _check_size(name, string, max_length, "characters in a string")
    return tuple(strings)


def _checked_ids(name: str, token_ids: Sequence[Any], max_size: int) -> tuple[int, ...]:
    _check_size(name, token_ids, max_size, "ids")
    for i, token_id in enumerate(token_ids):
        if not _is_int(token_id, 0, _MAX_INT):
            raise InvalidRequestError(f"{name}[{i}]", token_id, f"an integer from 0 to {_MAX_INT}")
    return tuple(token_ids)


def _checked_bias(biases: Mapping[Any, Any]) -> dict[int, float]:
    """Return a copy of the biases; raise InvalidRequestError naming the id."""
    _check_size("logit_bias", biases, MAX_BIASED_IDS, "ids")
    limit = _real(-MAX_BIAS, MAX_BIAS, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    for token_id, bias in biases.items():
        if not _is_int(token_id, 0, _MAX_INT):
            raise InvalidRequestError("logit_bias", token_id, f"a mapping of ids from 0 to {_MAX_INT}")
        if not limit.accepts(bias):
            raise InvalidRequestError(f"logit_bias[{token_id}]", bias, limit.words)
    return {token_id: float(bias) for token_id, bias in biases.items()}


@functools.cache
def sampling_table() -> dict[str, SamplingField]:
    """Return the table by field name, in order."""
    return {one.name: one.metadata[_TABLE_KEY] for one in fields(SamplingParams)}


@functools.cache
def plan_columns() -> dict[str, Column]:
    """Return the columns of a step's plan by field name, in order."""
    return {name: row.column for name, row in sampling_table().items() if row.column is not None}


@functools.cache
def penalty_columns() -> dict[str, Column]:
    """Return the columns of penalties beside a plan by field name, in order."""
    return {name: row.penalty for name, row in sampling_table().items() if row.penalty is not None}


@functools.cache
def taken_fields(route: str) -> tuple[str, ...]:
    """Return the names of the fields that a route accepts under their own names."""
    return tuple(
        name for name, row in sampling_table().items() if row.routes is not None and route in row.routes
    )


@functools.cache
def refused_fields(route: str) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a route refuses, each with the one value that it tolerates: the default."""
    defaults = {option.name: option.default for option in options_of(SamplingParams)}
    empty: dict[Any, Any] = {tuple: [], dict: {}}
    return {
        name: (empty.get(defaults[name], defaults[name]),)
        for name, row in sampling_table().items()
        if row.routes is not None and route not in row.routes
    }
