"""The public API: multi-turn generation on one model.

Owns: the public methods of a model, in one class. It drives an `Engine` from one thread.
Does not know: how prompts become tokens (`PromptEncoder`), how callers wait for turns (`stream`), batches,
pages, or devices.
Called by user code and by most commands.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from pensieve_jax.assembly import Assembled, assemble
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.describe import describe
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.explanation import Explanation
from pensieve_jax.engine.loop import Observe, unobserved
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import ConversationInfo, ConversationRecord
from pensieve_jax.model_source import DEFAULT_MODEL
from pensieve_jax.prompts import ChatOptions, Messages, Prompt, PromptEncoder, parsers_of
from pensieve_jax.stream import Stream, run_all


class LLM:
    """A model that serves conversations and keeps their KV cache between turns.

    Only one thread at a time may use it. Call `close`, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        history: str | Path | None = None,
        config: EngineConfig | None = None,
        synchronous: Literal["normal", "full"] = "normal",
        progress: bool | None = None,
        clock: Clock | None = None,
        observe: Observe = unobserved,
    ) -> None:
        """Load a model and compile its steps.

        Args:
          model: the name or directory of a model. "chat" is the small chat model in the package. Other values
            are a Hugging Face directory (config.json, safetensors, tokenizer files), an Orbax directory made
            from one by `scripts/convert_checkpoint.py`, a hub name, or `random:<preset>` for seeded random
            weights of a known shape.
          dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's dtype, but float32 on a CPU.
          history: SQLite file to which turns are committed, or a Postgres URL, postgresql://...; None keeps
            turns in memory.
          config: sizes and limits.
          synchronous: "full" makes committed turns survive a power loss, not only a crash of the process.
          progress: show progress bars while loading, compiling and generating; None: only on a terminal.
          clock: source of the time; the wall clock, except in tests.
          observe: called with the decisions of every step, including why chunks are dropped; see
            `engine.loop.Observe`.

        Raises:
          ConfigError: the model is unknown, or a value cannot work with this model or device.
          model_defs.ModelError: the checkpoint or architecture is not supported.
          HistoryError: the history cannot be opened, belongs to another model, or was damaged and set aside.
        """
        shown = sys.stderr.isatty() if progress is None else progress
        parts = assemble(
            model,
            dtype=dtype,
            history=history,
            synchronous=synchronous,
            config=config,
            progress=shown,
            clock=clock,
            observe=observe,
        )
        self._take(parts, shown)

    @classmethod
    def of_parts(cls, parts: Assembled, *, progress: bool = False) -> Self:
        """Return an LLM on the engine of `parts`, for programs that start several engines on one runner."""
        llm = cls.__new__(cls)
        llm._take(parts, progress)
        return llm

    def _take(self, parts: Assembled, progress: bool) -> None:
        self._progress = progress
        self.engine: Engine = parts.engine
        self.model_config = parts.model_config
        self.tokenizer = parts.tokenizer
        self._runner = parts.runner
        self._parts = parts
        self._prompts = PromptEncoder(
            parts.tokenizer, lambda: self.engine.conversations, parsers_of(parts.config)
        )

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
          prompts: the new turns, as text, token ids or chat messages (for these see `chat`).
          sampling_params: one for all prompts, or one per prompt.
          conversation_ids: one per prompt. A new id begins a conversation; None is a one-off request, whose
            KV cache is freed at its end.
          prefix: a result of `share_prefix`; each of these conversations begins with it, before its prompt.
            For first turns only.

        Everything is checked before anything runs. Raises InvalidRequestError, ContextLengthError,
        ConversationBusyError or TokenizerMissingError. Raises StepFailedError or HistoryError if a turn was
        lost; the error's `outputs` has the results of the others. An interrupt cancels the turns that
        have not ended. If it falls into the middle of a step, turns of other streams are lost as well.
        """
        self.engine.expire_idle()
        specs = self._prompts.turns(prompts, sampling_params, conversation_ids, prefix=prefix)
        return run_all(self.engine, specs, progress=self._progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
        prefix: SharedPrefix | None = None,
    ) -> Stream:
        """Start one turn and iterate over its reply; see `generate` for arguments and errors."""
        self.engine.expire_idle()
        return Stream(
            self.engine, self._prompts.turn(prompt, sampling_params, conversation_id, prefix=prefix)
        )

    @overload
    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
        prefix: SharedPrefix | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Output: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversation_ids: Sequence[str | None] | None = None,
        prefix: SharedPrefix | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[Output]: ...
    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        conversation_id: str | None = None,
        conversation_ids: Sequence[str | None] | None = None,
        prefix: SharedPrefix | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Output | list[Output]:
        """Run a turn of the NEW messages with the model's chat template; the history has the earlier ones.

        Args:
          messages: messages of one conversation, or a list of such lists for a list of outputs.
          sampling_params: one for all conversations, or a list with one per conversation.
          conversation_id: id of a single conversation; see `generate`.
          conversation_ids: ids of several conversations.
          prefix: result of `share_prefix` for the messages before these; for first turns only. A prefix of
            text or ids must be what the template writes first for these messages.
          tools: function tools in OpenAI's form. None takes those of the conversation's last turn, and an
            empty list takes none.
          chat_template_kwargs: further variables of the chat template, such as {"enable_thinking": False}.
            None takes those of the last turn.
          continue_final_message: take the last message, of the assistant, as the beginning of the reply. The
            output has only the text after it.

        Raises ChatTemplateError if the model has no template or its template refuses the conversation,
        InvalidRequestError for messages that the conversation has already, a tool message that answers no
        call, or tools and variables that the template does not read, and the errors of `generate`.
        """
        self.engine.expire_idle()
        options = ChatOptions(tools, chat_template_kwargs, continue_final_message)
        several = isinstance(messages, list | tuple) and any(
            isinstance(one, list | tuple) for one in messages
        )
        if several:
            _check_unused("conversation_id", conversation_id, "conversation_ids, one for each list")
            specs = self._prompts.chat_turns(
                messages, sampling_params, conversation_ids, prefix=prefix, options=options
            )
        else:
            _check_unused("conversation_ids", conversation_ids, "conversation_id, or give a list of lists")
            specs = [
                self._prompts.chat_turn(
                    messages, sampling_params, conversation_id, prefix=prefix, options=options
                )
            ]
        with self._prompts.named_tools(options):
            outputs = run_all(self.engine, specs, progress=self._progress)
        return outputs if several else outputs[0]

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
        prefix: SharedPrefix | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Stream:
        """Run `chat` for one conversation as a stream; see `chat` for arguments and errors."""
        self.engine.expire_idle()
        options = ChatOptions(tools, chat_template_kwargs, continue_final_message)
        spec = self._prompts.chat_turn(
            messages, sampling_params, conversation_id, prefix=prefix, options=options
        )
        with self._prompts.named_tools(options):
            return Stream(self.engine, spec)

    # Turns that the caller steps

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversation_ids: Sequence[str | None] | None = None,
        prefix: SharedPrefix | None = None,
    ) -> list[Turn]:
        """Queue turns and return immediately; see `generate` for arguments and for errors of the checks.

        They run in the steps that `step`, `generate`, `chat` or any stream takes. For each turn,
        `take_delta()` returns the part of the reply since the last call, and `result()` returns `output` or
        raises `error` once it is `done`. Its conversation is busy until then: call `step`, or `cancel` it.
        Keep the turns: one without a reference is cancelled, like that of a dropped stream.
        """
        self.engine.expire_idle()
        specs = self._prompts.turns(prompts, sampling_params, conversation_ids, prefix=prefix)
        return self.engine.submit(specs)

    def step(self) -> list[Turn]:
        """Run one step of all turns in progress; returns those that ended in it, including streams' turns."""
        return self.engine.step()

    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent; a turn that is done does not change."""
        self.engine.cancel(turn)

    @property
    def unfinished(self) -> tuple[Turn, ...]:
        """Turns in progress, including those of streams, in order of submission."""
        return self.engine.unfinished

    # Beginnings that conversations share

    def share_prefix(
        self,
        prefix: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> SharedPrefix:
        """Make a prefix for conversations to share: text, token ids, or messages such as a system prompt.

        Conversations with the prefix have its `tools` and `chat_template_kwargs`; see `chat`.

        The first turn with the prefix computes its KV cache, which all later ones reuse. A conversation that
        is loaded from the history also shares it, if a turn has used the prefix since the start. Otherwise
        that conversation has a copy of its own.

        Raises InvalidRequestError, ContextLengthError or TokenizerMissingError. Raises ChatTemplateError if
        the template does not render these messages first and independently of later ones.
        """
        return self.engine.share_prefix(
            *self._prompts.prefix(prefix, ChatOptions(tools, chat_template_kwargs))
        )

    def release_prefix(self, prefix: SharedPrefix) -> None:
        """Release a prefix; its KV cache is freed after the last conversation in memory that shares it.

        Later turns with it raise InvalidRequestError. A second call does nothing.
        """
        self.engine.release_prefix(prefix)

    # Conversations

    def history(self, conversation_id: str) -> ConversationRecord:
        """Return the committed turns of a conversation; raises UnknownConversationError."""
        self.engine.expire_idle()
        return self.engine.conversations.record(conversation_id)

    def conversations(self) -> list[ConversationInfo]:
        """Return every conversation with a committed turn, the most recently active first."""
        self.engine.expire_idle()
        return self.engine.conversations.listing()

    def truncate(
        self, conversation_id: str, num_tokens: int | None = None, *, num_turns: int | None = None
    ) -> None:
        """Keep only the first tokens or turns of a conversation, to edit and regenerate from there.

        Args:
          conversation_id: the conversation.
          num_tokens: number of leading tokens to keep.
          num_turns: number of turns to keep, instead of `num_tokens`. The context is that at the end of the
            last of them, even if the chat template wrote it differently for later turns.

        Raises UnknownConversationError, ConversationBusyError or InvalidRequestError.
        """
        self.engine.truncate(conversation_id, num_tokens, num_turns=num_turns)

    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Create a conversation from all of another one, or from its first `num_tokens` tokens.

        The two are independent from then on; a running turn of the first is not included. Raises
        UnknownConversationError, ConversationBusyError for a new id whose first turn is running, and
        InvalidRequestError for a new id that exists already.
        """
        self.engine.expire_idle()
        self.engine.fork(conversation_id, new_conversation_id, num_tokens)

    def end(self, conversation_id: str) -> None:
        """Delete a conversation; raises UnknownConversationError or ConversationBusyError."""
        self.engine.end(conversation_id)

    def explain(self, conversation_id: str) -> Explanation:
        """Explain where each chunk of a conversation is, and when, why and at what value it was dropped.

        Use `str` for a readable text. Raises UnknownConversationError.
        """
        self.engine.expire_idle()
        return self.engine.explain(conversation_id)

    # The rest

    def forget_experience(self) -> None:
        """Discard what the policy `learned` has learned; raises HistoryError."""
        self.engine.forget_experience()

    def stats(self) -> dict[str, int | float]:
        """Return counters: steps, compilations, tokens by origin, copies, pages, conversations."""
        return self.engine.stats()

    def describe(self) -> dict[str, Any]:
        """Describe model, device, kernels with reasons, tiers and steps on this machine, as plain values.

        `print` shows a line for each value, and `json.dumps` accepts the result.
        `pensieve_jax.describe.describe` documents the keys.
        """
        return describe(self._parts)

    def memory_analysis(self) -> dict[str, Any]:
        """Return bytes per device: weights, pools, and the compiler's estimate for each bucket."""
        return self._runner.memory_analysis()

    def close(self) -> None:
        """Cancel all turns and release the history; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_unused(field: str, value: object, instead: str) -> None:
    if value is not None:
        raise InvalidRequestError(field, value, "None for these messages", f"use {instead}")
