"""The public API: multi-turn generation on one model.

Owns: prompts as people give them (text, ids, chat messages), waiting for turns, streams.
Does not know: batches, pages, or devices; it drives an `Engine`, from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from tqdm import tqdm

from pensieve_jax.assembly import DEFAULT_MODEL, assemble
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.errors import (
    InvalidRequestError,
    TokenizerMissingError,
    UnknownConversationError,
)
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.explanation import Explanation
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.validation import TurnSpec
from pensieve_jax.history import ConversationInfo, ConversationRecord
from pensieve_jax.stream import Stream, result_of
from pensieve_jax.text import ChatFormat, EarlierTurn, check_messages

type Prompt = str | Sequence[int]
"""The NEW turn only: text, or token ids."""


class LLM:
    """A model that serves conversations, keeping their state between turns.

    One thread at a time may use it. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        history: str | Path | None = None,
        config: EngineConfig | None = None,
        synchronous: Literal["normal", "full"] = "normal",
        progress: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """Load a model and compile its steps.

        Args:
          model: "chat", the small chat model that comes with the package; a Hugging Face directory
            (config.json, safetensors, tokenizer files), an Orbax directory made from one by
            `scripts/convert_checkpoint.py`, a hub name, or `random:<preset>` for seeded random weights of a
            known shape.
          dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's, and float32 on a CPU.
          history: SQLite file that turns are committed to; None keeps them in memory.
          config: sizes and limits.
          synchronous: "full" makes committed turns survive a power loss, not only the process's death.
          progress: show bars while loading, compiling and generating.
          clock: where the time comes from; the wall clock unless a test brings its own.

        Raises:
          ConfigError: a configuration value that cannot work with this model or device, or an unknown model.
          model_defs.ModelError: a checkpoint or an architecture that cannot be served.
          HistoryError: the history cannot be opened, is another model's, or was damaged and set aside.
        """
        parts = assemble(
            model,
            dtype=dtype,
            history=history,
            synchronous=synchronous,
            config=config or EngineConfig(),
            progress=progress,
            clock=clock,
        )
        self.engine: Engine = parts.engine
        self.model_config = parts.model_config
        self.tokenizer = parts.tokenizer
        self._runner = parts.runner
        self._progress = progress
        self._chat_format: ChatFormat | None = None

    # Generating

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversation_ids: Sequence[str | None] | None = None,
        prefix: SharedPrefix | None = None,
    ) -> list[Output]:
        """Run one turn of each conversation, and return the outputs in the order of the prompts.

        Args:
          prompts: the new turns, as text or token ids.
          sampling_params: for all of them, or one each.
          conversation_ids: a new id begins a conversation; None is a one-off request, whose state is
            freed at its end.
          prefix: what `share_prefix` returned: each of these conversations begins with it, before its
            prompt. For first turns only.

        Everything is checked before anything runs. Raises InvalidRequestError, ContextLengthError,
        ConversationBusyError or TokenizerMissingError, and StepFailedError or HistoryError for a turn that
        was lost on the way. An interrupt cancels the turns that have not ended; one that falls into the
        middle of a step loses those of other streams as well.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidRequestError("prompts", prompts, "a list of prompts", "put the prompt into a list")
        self.engine.expire_idle()
        params = _one_each("sampling_params", sampling_params, SamplingParams(), len(prompts))
        ids: list[str | None] = _one_each("conversation_ids", conversation_ids, None, len(prompts))
        specs = [
            TurnSpec(self._encode(prompt, name, f"prompts[{i}]", prefix), one, name, prefix=prefix)
            for i, (prompt, one, name) in enumerate(zip(prompts, params, ids, strict=True))
        ]
        return self._run(self.engine.submit(specs))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
        prefix: SharedPrefix | None = None,
    ) -> Stream:
        """Start one turn and iterate over what it says; see `generate` for arguments and errors."""
        self.engine.expire_idle()
        token_ids = self._encode(prompt, conversation_id, "prompt", prefix)
        params = sampling_params or SamplingParams()
        return self._stream(TurnSpec(token_ids, params, conversation_id, prefix=prefix))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
    ) -> Output:
        """Run a turn of the NEW messages, in the model's chat template; earlier ones are remembered.

        Raises ChatTemplateError for a model without a template or one that cannot be continued, and what
        `generate` raises.
        """
        self.engine.expire_idle()
        spec = self._chat_spec(messages, sampling_params, conversation_id)
        return self._run(self.engine.submit([spec]))[0]

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
    ) -> Stream:
        """`chat`, as a stream."""
        self.engine.expire_idle()
        return self._stream(self._chat_spec(messages, sampling_params, conversation_id))

    def share_prefix(self, prefix: Prompt) -> SharedPrefix:
        """A beginning that conversations share, such as a system prompt: text, or token ids.

        Its KV state is computed by the first turn that is given it, and kept once for all of them. A
        conversation that is loaded from the history after a restart has its own copy.

        Raises InvalidRequestError, ContextLengthError or TokenizerMissingError.
        """
        return self.engine.share_prefix(self._encode(prefix, None, "prefix"))

    # Conversations

    def history(self, conversation_id: str) -> ConversationRecord:
        """The committed turns of a conversation; raises UnknownConversationError."""
        self.engine.expire_idle()
        return self.engine.conversations.record(conversation_id)

    def conversations(self) -> list[ConversationInfo]:
        """Every conversation with a committed turn, the most recently active first."""
        self.engine.expire_idle()
        return self.engine.conversations.listing()

    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, to edit and regenerate from there.

        Raises UnknownConversationError, ConversationBusyError or InvalidRequestError.
        """
        self.engine.truncate(conversation_id, num_tokens)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation. Raises UnknownConversationError or ConversationBusyError."""
        self.engine.end(conversation_id)

    def explain(self, conversation_id: str) -> Explanation:
        """Where a conversation's state is, chunk by chunk; what was dropped, when, why and at what worth.

        `str` of it is for people. Raises UnknownConversationError.
        """
        return self.engine.explain(conversation_id)

    # The rest

    def stats(self) -> dict[str, int | float]:
        """Counters: steps, compilations, tokens by origin, copies between tiers, pages, conversations."""
        return self.engine.stats()

    def memory_analysis(self) -> dict[str, Any]:
        """Bytes per device: weights, pools, and what the compiler says of each bucket."""
        return self._runner.memory_analysis()

    def close(self) -> None:
        """Cancel what runs and release the history; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        """The LLM itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # Inside

    def _encode(
        self,
        prompt: Prompt,
        conversation_id: str | None,
        field: str,
        prefix: SharedPrefix | None = None,
    ) -> Sequence[int]:
        if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str | bytes):
            return list(prompt)
        if not isinstance(prompt, str):
            raise InvalidRequestError(field, prompt, "text or a list of token ids")
        if self.tokenizer is None:
            raise TokenizerMissingError
        if not prompt:
            raise InvalidRequestError(field, prompt, "at least one token")
        is_start = prefix is None and self.engine.conversations.num_tokens(conversation_id) == 0
        return self.tokenizer.encode(prompt, add_bos=is_start)

    def _chat_spec(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None,
        conversation_id: str | None,
    ) -> TurnSpec:
        new_messages = check_messages(messages)
        token_ids = self._format().turn_token_ids(self._earlier_turns(conversation_id), new_messages)
        return TurnSpec(token_ids, sampling_params or SamplingParams(), conversation_id, new_messages)

    def _format(self) -> ChatFormat:
        if self._chat_format is None:
            if self.tokenizer is None:
                raise TokenizerMissingError
            self._chat_format = ChatFormat(self.tokenizer)
        return self._chat_format

    def _earlier_turns(self, conversation_id: str | None) -> list[EarlierTurn]:
        if conversation_id is None:
            return []
        try:
            turns = self.engine.conversations.record(conversation_id).turns
        except UnknownConversationError:
            return []
        return [
            EarlierTurn(turn.messages, turn.output_text, turn.output_token_ids, turn.finish_reason)
            for turn in turns
        ]

    def _run(self, turns: Sequence[Turn]) -> list[Output]:
        """Step until all have ended; whatever interrupts this cancels those that have not."""
        unfinished = set(turns)
        try:
            with tqdm(total=len(turns), desc="turns", disable=not self._progress or len(turns) < 2) as bar:
                while unfinished and self.engine.has_unfinished:
                    ended = unfinished.intersection(self.engine.step())
                    unfinished -= ended
                    bar.update(len(ended))
        finally:
            for turn in turns:
                if not turn.done:
                    self.engine.cancel(turn)
        return [result_of(turn) for turn in turns]

    def _stream(self, spec: TurnSpec) -> Stream:
        return Stream(self.engine, self.engine.submit([spec])[0])


def _one_each[T](field: str, given: T | Sequence[T] | None, default: T, count: int) -> list[T]:
    """`given` for each of `count` prompts: one value for all of them, or a sequence of that length."""
    if given is None:
        return [default] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != count:
        raise InvalidRequestError(field, given, f"a list of {count}, one for each prompt")
    return list(given)
