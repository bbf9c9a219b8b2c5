"""The results of turns: tokens, text, how a turn ended, and where its history came from.

Owns: these immutable values, and what a call for several of them raises.
Does not know: how they are produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from pensieve_jax.core.errors import InvalidRequestError, PensieveError
from pensieve_jax.core.prompt_logprobs import PromptLogprobs
from pensieve_jax.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


class TokenLogprob(NamedTuple):
    """Log-probabilities at one position, under the model's distribution before temperature."""

    token_id: int
    logprob: float
    top: dict[int, float]  # id -> logprob of the k most likely, most likely first; empty for k = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Where every token of a turn came from.

    reused_gpu + swapped_in + recomputed + prefilled = history + prompt. The four values are set when the turn
    first enters the batch. They are 0 if it was cancelled before; if it is cancelled later, tokens that were
    scheduled count as computed.

    Attributes:
      prompt_tokens: ids of the new turn.
      reused_gpu_tokens: history whose KV was still in device memory.
      swapped_in_tokens: history copied back from host memory.
      recomputed_tokens: history whose KV was lost and computed again.
      prefilled_tokens: tokens computed for the first time: the prompt, and the last token of the turn before.
      output_tokens: ids of the reply.
      num_suspensions: number of times that the turn was removed from the batch under memory pressure.
      resume_recomputed_tokens: tokens computed again because of suspensions; not part of the sum.
      resume_swapped_in_tokens: tokens copied back from host memory after suspensions; not part of the sum.
      reasoning_tokens: those of `output_tokens` that are reasoning, with its marks.
    """

    prompt_tokens: int
    reused_gpu_tokens: int
    swapped_in_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    output_tokens: int
    num_suspensions: int = 0
    resume_recomputed_tokens: int = 0
    resume_swapped_in_tokens: int = 0
    reasoning_tokens: int = 0


class ToolCall(NamedTuple):
    """A call of a tool that the model asks for.

    Attributes:
      call_id: the id that the message with the result names.
      name: name of the tool.
      arguments: the arguments as the model wrote them, usually the text of a JSON object.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Output:
    """A finished turn.

    Attributes:
      conversation_id: None for a one-off request.
      token_ids: the reply, up to and including the id that ended it.
      text: the reply as text, without its stop string and special tokens; "" without a tokenizer. Of a reply
        with reasoning or tool calls, it is the content only.
      finish_reason: "stop" (end-of-sequence, stop id or stop string), "length" or "cancelled".
      usage: where the tokens came from.
      seed: the seed that a sampled turn was drawn with.
      logprobs: one entry per reply token if requested, else None.
      prompt_logprobs: one entry per token of the turn's prompt if requested, else None. A
        conversation's first token has the entry None, since nothing predicts it.
      ended_at_s: when the turn ended, by the engine's clock, as stored in the history; None from padded
        batches. Ignored when outputs are compared.
      stop_string: the stop string that ended the reply, else None; also None in an output that was read back
        from the history.
      reasoning: the model's reasoning before its content; "" without any.
      tool_calls: the calls of tools, in order.
    """

    conversation_id: str | None
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    ended_at_s: float | None = field(default=None, compare=False)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed reply: whole characters, and the ids that were sampled for it.

    Text can lag behind ids while a character is incomplete, or while text may become a stop string. In a
    chat, `text` is content and `reasoning` is the model's reasoning; calls are in the output at the end.
    """

    text: str
    token_ids: tuple[int, ...]
    reasoning: str = ""


class Handle[T](Protocol):
    """Handle of a finished request."""

    @property
    def error(self) -> Exception | None:
        """The error of the request; None if it succeeded."""
        ...

    def result(self) -> T:
        """Return the result; raise `error` if the request failed."""
        ...


def all_results[T](handles: Sequence[Handle[T]]) -> list[T]:
    """Return all results; if one failed, raise the first PensieveError, with the results in its `outputs`."""
    for handle in handles:
        if isinstance(handle.error, PensieveError) and len(handles) > 1:
            error = _twin(handle.error)
            error.outputs = [one.result() if one.error is None else None for one in handles]
            raise error
    return [handle.result() for handle in handles]


def _twin(error: PensieveError) -> PensieveError:
    """Return a copy of the error, as one failure may end requests of several callers with one object."""
    twin = type(error).__new__(type(error), *error.args)
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    return twin


def one_each(
    field: str, given: Any, default: Any, count: int, kind: type | None = SamplingParams
) -> list[Any]:
    """Return `given` for each of `count` prompts: one `kind` for all, or a sequence of that length."""
    if given is None:
        return [default] * count
    if kind is not None and isinstance(given, kind):
        return [given] * count
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != count:
        one = "" if kind is None else f"one {kind.__name__} for all, or "
        raise InvalidRequestError(field, given, f"{one}a list of {count}, one for each prompt")
    return list(given)
