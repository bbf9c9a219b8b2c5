"""`AsyncEngine`, the library's interface for programs with an event loop.

Owns: the start of an engine in a separate process, and the submission of text, token ids or messages.
Does not know: batches, pages, devices, or the protocol between the processes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self, get_args

import numpy as np

from pensieve_jax.config import EngineConfig, checked_config
from pensieve_jax.core.errors import ConfigError, InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec, check_token_ids
from pensieve_jax.history import codec
from pensieve_jax.history.opening import absolute
from pensieve_jax.model_source import DEFAULT_MODEL
from pensieve_jax.prompts import Prompt, is_messages
from pensieve_jax.server.engine_process.messages import Start, check_sampling_params, sent_prompt
from pensieve_jax.server.engine_process.running_turn import RunningTurn
from pensieve_jax.server.engine_process.spawn import WORKER, ProcessHandle
from pensieve_jax.server.engine_process.supervisor import SupervisedEngine
from pensieve_jax.server.logs import LogFormat
from pensieve_jax.text import check_messages


class AsyncEngine(SupervisedEngine):
    """Model that serves conversations from a separate process, for programs with an event loop.

    Call every method from the event loop that started the engine. A process that dies is restarted: its
    running turns raise EngineDiedError, and `epoch` increases.

    Attributes:
      worker: the module that the process runs. A subclass may have its own.
    """

    worker: ClassVar[str] = WORKER

    @classmethod
    def start(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        history: str | Path | None = None,
        config: EngineConfig | None = None,
        synchronous: Literal["normal", "full"] = "normal",
        progress: bool | None = None,
        log_format: LogFormat | None = None,
    ) -> Self:
        """Return an engine that `async with` or `await` starts; see `LLM` for the other arguments.

        `log_format` is the format of the log lines that the engine's process writes to stderr; None keeps
        Python's default.

        Starting raises the errors of `LLM`, and EngineDiedError if the process dies before it is ready.
        """
        if not isinstance(model, str | Path):
            raise ConfigError("model", model, "a name or a path")
        if not isinstance(dtype, str):
            raise ConfigError("dtype", dtype, "auto, float32, bfloat16 or float16")
        if synchronous not in ("normal", "full"):
            raise ConfigError("synchronous", synchronous, '"normal" or "full"')
        if progress is not None and not isinstance(progress, bool):
            raise ConfigError("progress", progress, "True, False or None")
        if log_format not in (None, *get_args(LogFormat.__value__)):
            raise ConfigError("log_format", log_format, f"None or one of {get_args(LogFormat.__value__)}")
        greeting = Start(
            str(model),
            dtype,
            None if history is None else absolute(history),
            synchronous,
            checked_config(config),
            sys.stderr.isatty() if progress is None else progress,
            log_format,
        )
        return cls(functools.partial(ProcessHandle.begin, greeting, cls.worker))

    def submit(
        self,
        prompt: Prompt | TurnSpec,
        sampling_params: SamplingParams | None = None,
        *,
        conversation_id: str | None = None,
    ) -> RunningTurn:
        """Queue a turn and return at once.

        Args:
          prompt: the NEW turn only, as text, token ids or chat messages, which the engine's process encodes;
            or a complete `TurnSpec`.
          sampling_params: None for the defaults. A TurnSpec has its own.
          conversation_id: a new id begins a conversation; None is a one-off request.

        `accepted` and the iteration of the turn raise the errors of `LLM.submit`. This method raises
        EngineClosedError while the engine accepts no turns. It raises InvalidRequestError if
        `sampling_params` is not a SamplingParams, or if parameters or an id are given with a TurnSpec.
        """
        if isinstance(prompt, TurnSpec):
            if sampling_params is not None or conversation_id is not None:
                raise InvalidRequestError(
                    "prompt", prompt, "the only argument", "a TurnSpec contains the parameters and the id"
                )
            return super().submit(prompt)
        connection = self._open_for_turns()
        params = SamplingParams() if sampling_params is None else sampling_params
        check_sampling_params(params)
        number = next(self._numbers)
        try:
            plain = _plain(prompt, self.info.limits.vocab_size)
            sent = sent_prompt(number, plain, params, conversation_id)
        except InvalidRequestError as error:
            return connection.refused(number, error)
        return connection.submit([(sent, None)])[0]

    async def __aenter__(self) -> Self:
        """Start the engine; raises the errors listed at `start`."""
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the engine and cancel its running turns."""
        await self.close()

    def __await__(self) -> Generator[object, None, Self]:
        """Start the engine by `engine = await AsyncEngine.start(...)`; the caller must close it."""
        return self.__aenter__().__await__()


def _plain(prompt: object, vocab_size: int) -> object:
    """Return the prompt as plain values; NumPy numbers and mappings other than dict cannot be sent.

    Raises InvalidRequestError for an invalid prompt here, because the engine's process could not read it.
    """
    if isinstance(prompt, str):
        codec.check_text(prompt, "prompt")
        return prompt
    if is_messages(prompt):
        return list(check_messages(prompt, "prompt"))
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise InvalidRequestError("prompt", prompt, "text, a list of token ids, or a list of messages")
    check_token_ids("prompt", prompt, vocab_size)
    return prompt.tolist() if isinstance(prompt, np.ndarray) else [int(token_id) for token_id in prompt]
