"""The public API: multi-turn generation on one model.

Owns: what a caller can ask of a model, in one place.
Does not know: how prompts become tokens (`PromptEncoder`), how turns are waited for (`stream`), batches,
pages, or devices; it drives an `Engine`, from one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from pensieve_jax.assembly import assemble
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
from pensieve_jax.prompts import Messages, Prompt, PromptEncoder
from pensieve_jax.stream import Stream, run_all


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
        progress: bool | None = None,
        clock: Clock | None = None,
        observe: Observe = unobserved,
    ) -> None:
        """Load a model and compile its steps.

        Args:
          model: "chat", the small chat model that comes with the package; a Hugging Face directory
            (config.json, safetensors, tokenizer files), an Orbax directory made from one by
            `scripts/convert_checkpoint.py`, a hub name, or `random:<preset>` for seeded random weights of a
            known shape.
          dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's, and float32 on a CPU.
          history: SQLite file that turns are committed to, or a URL of Postgres, postgresql://...; None keeps
            them in memory.
          config: sizes and limits.
          synchronous: "full" makes committed turns survive a power loss, not only the process's death.
          progress: show bars while loading, compiling and generating; None: on a terminal.
          clock: where the time comes from; the wall clock unless a test brings its own.
          observe: told what every step decides, and why chunks are dropped; see `engine.loop.Observe`.

        Raises:
          ConfigError: a configuration value that cannot work with this model or device, or an unknown model.
          model_defs.ModelError: a checkpoint or an architecture that cannot be served.
          HistoryError: the history cannot be opened, is another model's, or was damaged and set aside.
        """
        self._progress = sys.stderr.isatty() if progress is None else progress
        parts = assemble(
            model,
            dtype=dtype,
            history=history,
            synchronous=synchronous,
            config=config,
            progress=self._progress,
            clock=clock,
            observe=observe,
        )
        self.engine: Engine = parts.engine
        self.model_config = parts.model_config
        self.tokenizer = parts.tokenizer
        self._runner = parts.runner
        self._parts = parts
        self._prompts = PromptEncoder(parts.tokenizer, lambda: self.engine.conversations)

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
          sampling_params: for all of them, or one each.
          conversation_ids: a new id begins a conversation; None is a one-off request, whose state is
            freed at its end.
          prefix: what `share_prefix` returned: each of these conversations begins with it, before its
            prompt. For first turns only.

        Everything is checked before anything runs. Raises InvalidRequestError, ContextLengthError,
        ConversationBusyError or TokenizerMissingError, and StepFailedError or HistoryError for a turn that
        was lost on the way: its `outputs` are what the others became. An interrupt cancels the turns that
        have not ended; one that falls into the middle of a step loses those of other streams as well.
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
        """Start one turn and iterate over what it says; see `generate` for arguments and errors."""
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
    ) -> Output: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversation_ids: Sequence[str | None] | None = None,
        prefix: SharedPrefix | None = None,
    ) -> list[Output]: ...
    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        conversation_id: str | None = None,
        conversation_ids: Sequence[str | None] | None = None,
        prefix: SharedPrefix | None = None,
    ) -> Output | list[Output]:
        """Run a turn of the NEW messages, in the model's chat template; earlier ones are remembered.

        Args:
          messages: those of one conversation, or a list of such lists, for a list of outputs.
          sampling_params: for all of them; for several conversations also a list, one each.
          conversation_id: of the one conversation; see `generate`.
          conversation_ids: of several.
          prefix: what `share_prefix` returned of the messages that come before these, for first turns only.
            One of text or ids must be what the template writes first for these messages.

        Raises ChatTemplateError for a model without a template or one that cannot be continued,
        InvalidRequestError for messages that a conversation has already, and what `generate` raises.
        """
        self.engine.expire_idle()
        several = isinstance(messages, list | tuple) and any(
            isinstance(one, list | tuple) for one in messages
        )
        if several:
            _check_unused("conversation_id", conversation_id, "conversation_ids, one for each list")
            specs = self._prompts.chat_turns(messages, sampling_params, conversation_ids, prefix=prefix)
        else:
            _check_unused("conversation_ids", conversation_ids, "conversation_id, or give a list of lists")
            specs = [self._prompts.chat_turn(messages, sampling_params, conversation_id, prefix=prefix)]
        outputs = run_all(self.engine, specs, progress=self._progress)
        return outputs if several else outputs[0]

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
        prefix: SharedPrefix | None = None,
    ) -> Stream:
        """`chat` of one conversation, as a stream."""
        self.engine.expire_idle()
        spec = self._prompts.chat_turn(messages, sampling_params, conversation_id, prefix=prefix)
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
        """Queue turns and return at once; see `generate` for arguments, and for what is raised at once.

        They run in the steps that `step`, `generate`, `chat` or any stream takes. A turn has `take_delta()`,
        what came since the last call; `done`; `output`, `error`; and `result()`, which returns the one or
        raises the other. Its conversation is busy until it is done: step, or `cancel` it. Keep the turns: one
        that nobody holds any more is cancelled, as a dropped stream's is.
        """
        self.engine.expire_idle()
        specs = self._prompts.turns(prompts, sampling_params, conversation_ids, prefix=prefix)
        return self.engine.submit(specs)

    def step(self) -> list[Turn]:
        """Take one step of all turns in progress; returns those that ended in it, whoever submitted them."""
        return self.engine.step()

    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent; nothing happens to one that is done."""
        self.engine.cancel(turn)

    @property
    def unfinished(self) -> tuple[Turn, ...]:
        """The turns in progress, streams' included, in the order in which they were submitted."""
        return self.engine.unfinished

    # Beginnings that conversations share

    def share_prefix(self, prefix: Prompt) -> SharedPrefix:
        """A beginning that conversations share: text, token ids, or messages such as a system prompt.

        Its KV state is computed by the first turn that is given it, and kept once for all of them. So it is
        for a conversation that is loaded from the history, if by then a turn has been given the prefix since
        the start; else that has its own copy.

        Raises InvalidRequestError, ContextLengthError or TokenizerMissingError; ChatTemplateError where the
        template does not write these messages before, and apart from, what follows.
        """
        return self.engine.share_prefix(*self._prompts.prefix(prefix))

    def release_prefix(self, prefix: SharedPrefix) -> None:
        """Keep a prefix's state for those in memory that begin with it only, and free it with the last.

        No turn takes it any more (InvalidRequestError). A second call does nothing.
        """
        self.engine.release_prefix(prefix)

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

    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> None:
        """Begin a conversation as another one begins: with all of it, or its first `num_tokens` tokens.

        Both go on by themselves; a running turn of the first is no part of the second. Raises
        UnknownConversationError, ConversationBusyError for a new id whose first turn is running, and
        InvalidRequestError for one that exists already.
        """
        self.engine.expire_idle()
        self.engine.fork(conversation_id, new_conversation_id, num_tokens)

    def end(self, conversation_id: str) -> None:
        """Forget a conversation. Raises UnknownConversationError or ConversationBusyError."""
        self.engine.end(conversation_id)

    def explain(self, conversation_id: str) -> Explanation:
        """Where a conversation's state is, chunk by chunk; what was dropped, when, why and at what worth.

        `str` of it is for people. Raises UnknownConversationError.
        """
        self.engine.expire_idle()
        return self.engine.explain(conversation_id)

    # The rest

    def forget_experience(self) -> None:
        """Have the order `learned` begin anew, with nothing learned; raises HistoryError."""
        self.engine.forget_experience()

    def stats(self) -> dict[str, int | float]:
        """Counters: steps, compilations, tokens by origin, copies between tiers, pages, conversations."""
        return self.engine.stats()

    def describe(self) -> dict[str, Any]:
        """What this is on this machine: model, device, kernels and why those, tiers, steps, as plain values.

        `print` shows a line for each, and `json.dumps` takes it as it is.
        `pensieve_jax.describe.describe` documents the keys.
        """
        return describe(self._parts)

    def memory_analysis(self) -> dict[str, Any]:
        """Bytes per device: weights, pools, and what the compiler says of each bucket."""
        return self._runner.memory_analysis()

    def close(self) -> None:
        """Cancel what runs and release the history; a second call does nothing."""
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
