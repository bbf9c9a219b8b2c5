"""The engine of padded batches: queries join and leave while it runs.

Owns: its public methods, the checks of what is submitted, and its device.
Does not know: prompts as text (`llm`), or how queries are scheduled.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pensieve_jax.core.change_guard import ChangeGuard
from pensieve_jax.core.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    StepFailedError,
)
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import ModelLimits, check_params, check_token_ids
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.metrics import Observe, StepSeen, unobserved
from pensieve_jax.rebatching.query import Query
from pensieve_jax.text import Tokenizer

if TYPE_CHECKING:
    from pensieve_jax.rebatching.device.runner import DeviceRunner

_MAX_PRIORITY = 2**31 - 1


class RebatchingEngine:
    """Queries of one model, in the rows of one padded batch. One thread at a time may use it.

    Attributes:
      loop: what runs, for checks of it; not to be changed.
    """

    def __init__(
        self,
        runner: DeviceRunner,
        config: RebatchingConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
        observe: Observe = unobserved,
    ) -> None:
        """Serve with a runner that is warm.

        Args:
          runner: the device.
          config: the limits that it was made with.
          tokenizer: makes text of replies; None serves token ids only.
          eos_token_ids: the model's end-of-sequence ids.
          observe: told of every step; see `metrics.StepSeen`.
        """
        self._runner, self._config, self._tokenizer = runner, config, tokenizer
        lattice, model = runner.lattice, runner.storage.model
        self._limits = ModelLimits(
            vocab_size=model.vocab_size,
            max_context_tokens=lattice.max_context_tokens,
            eos_token_ids=eos_token_ids,
            max_logprobs=config.max_logprobs,
            max_banned_ids=config.max_banned_ids,
        )
        self._observe = observe
        self._seen: list[StepSeen] = []
        self.loop = RebatchingLoop(config, lattice, runner, observe=self._seen.append)
        self._num_submitted = 0
        self._num_compilations = runner.num_compilations
        self._guard = ChangeGuard(self._recover)
        self._is_closed = False

    @property
    def max_context_tokens(self) -> int:
        """Of the longest query, prompt and reply."""
        return self._limits.max_context_tokens

    @property
    def has_unfinished(self) -> bool:
        """There is something to step for."""
        return bool(self.loop.queries)

    def submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0
    ) -> Query:
        """Queue a query and return at once; it joins the batch in one of the next steps.

        Args:
          prompt_token_ids: the prompt.
          params: how to sample; the defaults if None.
          priority: higher ones are served first, and with `preemptive` take the row of lower ones.

        Raises:
          InvalidRequestError, ContextLengthError, TokenizerMissingError: it cannot be served; nothing is
            queued.
          EngineClosedError: the engine was closed.
        """
        params = SamplingParams() if params is None else params
        return self.submit_many([prompt_token_ids], [params], [priority])[0]

    def submit_many(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> list[Query]:
        """Several, all of them or, with an error, none; see `submit`."""
        handles: list[Query] = []
        self.submit_into(handles, prompts, params, priorities)
        return handles

    def submit_into(
        self,
        handles: list[Query],
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> None:
        """The same; an interrupt leaves none in the batch that is not in `handles`."""
        self._check_usable()
        for name, values in (("params", params), ("priorities", priorities)):
            if len(values) != len(prompts):
                raise InvalidRequestError(name, values, f"a list of {len(prompts)}, one for each prompt")
        every = list(zip(prompts, params, priorities, strict=True))
        for index, (prompt, one, priority) in enumerate(every):
            place = "" if len(every) == 1 else f"[{index}]"
            self._check(place, prompt, one, priority)
        queries = [self._query(prompt, one, priority) for prompt, one, priority in every]

        def enter() -> None:
            for query in queries:
                handles.append(query)
                self.loop.submit(query)

        self._guard.run(enter)

    def step(self) -> list[Query]:
        """Launch the next step, and see what those before it sampled; returns the queries that are done."""
        self._check_usable()
        self._seen.clear()
        ended = self._guard.run(self.loop.step)
        for seen in self._seen:  # behind the change: what an observer raises harms nobody
            self._observe(seen)
        return ended

    def cancel(self, query: Query) -> bool:
        """End a query where it is; False if it is done, or was submitted to another engine."""
        self._check_usable()
        return self._guard.run(lambda: self.loop.cancel(query))

    def stats(self) -> dict[str, int | float]:
        """Counters (see `metrics.Metrics`), compilations since the start, and queries by where they are."""
        scheduler = self.loop.scheduler
        shape = scheduler.ring.shape
        return {
            **self.loop.metrics.as_dict(),
            "num_submitted": self._num_submitted,
            "num_compilations": self._runner.num_compilations - self._num_compilations,
            "num_running": scheduler.ring.num_held,
            "num_waiting": len(scheduler.line),
            "batch": 0 if shape is None else shape.batch,
            "length": 0 if shape is None else shape.length,
            "kv_bytes": self.loop.kv_bytes,
        }

    def close(self) -> None:
        """Free the KV state; queries that are not done fail with EngineClosedError. It may be repeated."""
        self._guard.check_thread()
        self._is_closed = True
        for query in self.loop.queries.values():
            if not query.done:
                query.error = EngineClosedError("The engine was closed.")
        self.loop.forget()

    def __enter__(self) -> Self:
        """The engine; `close` at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _query(self, prompt: Sequence[int], params: SamplingParams, priority: int) -> Query:
        self._num_submitted += 1
        return Query(
            self._num_submitted,
            [int(one) for one in prompt],
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            priority=priority,
            ending_ids=params.ending_ids(self._limits.eos_token_ids),
            max_context_tokens=self._limits.max_context_tokens,
            tokenizer=self._tokenizer,
        )

    def _check(self, place: str, prompt: Any, params: Any, priority: Any) -> None:
        field = f"prompts{place}" if place else "prompt"
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
        if not is_list and not (isinstance(prompt, np.ndarray) and prompt.ndim == 1):
            raise InvalidRequestError(field, prompt, "a list of token ids")
        check_token_ids(field, list(prompt), self._limits.vocab_size)
        most = self._limits.max_context_tokens - 1
        if len(prompt) > most:
            raise ContextLengthError(
                field,
                f"{len(prompt)} tokens",
                f"at most {most}, to leave room for one token of a reply",
                "max_context_tokens, lengths and kv_bytes say how long a row can be",
                len(prompt),
                most,
            )
        check_params(params, self._limits, self._tokenizer, group="")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MAX_PRIORITY:
            raise InvalidRequestError(
                f"priorities{place}" if place else "priority",
                priority,
                f"an integer of at most {_MAX_PRIORITY}, or its negative",
            )

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("The engine has been closed.")
        self._guard.check()

    def _recover(self) -> None:
        """An interrupt came in the middle of a change, so that nothing that is known can be trusted."""
        error = StepFailedError("an interrupt came in the middle of a step: all that ran or waited is lost")
        self.loop.lose_everything(error)
