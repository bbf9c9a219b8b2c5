"""Engine of a padded batch, which queries join and leave while it runs.

Owns: the public methods, the checks of submitted queries, and the device.
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
    """Engine that serves queries in the rows of one padded batch. Use it from one thread at a time.

    Attributes:
      loop: the event loop, for inspection only.
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
        """Create an engine on a runner that is warmed up.

        Args:
          runner: the device runner.
          config: the configuration that `runner` was created with.
          tokenizer: decodes replies to text; None serves token ids only.
          eos_token_ids: the model's end-of-sequence ids.
          observe: called after every step; see `metrics.StepSeen`.
        """
        self._runner, self._config, self._tokenizer = runner, config, tokenizer
        ring_shapes, model = runner.ring_shapes, runner.storage.model
        self._limits = ModelLimits(
            vocab_size=model.vocab_size,
            max_context_tokens=ring_shapes.max_context_tokens,
            eos_token_ids=eos_token_ids,
            max_logprobs=config.max_logprobs,
            max_banned_ids=config.max_banned_ids,
            adjusts=False,
        )
        self._observe = observe
        self._seen: list[StepSeen] = []
        self.loop = RebatchingLoop(config, ring_shapes, runner, observe=self._seen.append)
        self._num_submitted = 0
        self._num_compilations = runner.num_compilations
        self._guard = ChangeGuard(self._recover)
        self._is_closed = False

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of one query, prompt and reply."""
        return self._limits.max_context_tokens

    @property
    def has_unfinished(self) -> bool:
        """Whether any query is unfinished, so that `step` has work."""
        return bool(self.loop.queries)

    def submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0
    ) -> Query:
        """Queue a query and return at once; it joins the batch in one of the next steps.

        Args:
          prompt_token_ids: the prompt.
          params: how to sample; None means the defaults.
          priority: higher priorities are served first, and with `preemptive` take the rows of lower ones.

        Raises:
          InvalidRequestError, ContextLengthError, TokenizerMissingError: the query cannot be served; nothing
            is queued.
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
        """Submit several queries. On an error, none is queued; see `submit`."""
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
        """Submit queries and append each to `handles` first, so that an interrupt leaves no unknown query."""
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
        """Launch the next step and process the results of earlier ones; return the finished queries."""
        self._check_usable()
        self._seen.clear()
        ended = self._guard.run(self.loop.step)
        for seen in self._seen:  # outside the guard, so that an observer's exception cannot break the engine
            self._observe(seen)
        return ended

    def cancel(self, query: Query) -> bool:
        """Finish a query early; return False if it is done, or was submitted to another engine."""
        self._check_usable()
        return self._guard.run(lambda: self.loop.cancel(query))

    def stats(self) -> dict[str, int | float]:
        """Return the counters of `metrics.RebatchingMetrics`, new compilations, and queue sizes."""
        scheduler = self.loop.scheduler
        shape = scheduler.ring.shape
        return {
            **self.loop.metrics.as_dict(),
            "num_submitted": self._num_submitted,
            "num_compilations": self._runner.num_compilations - self._num_compilations,
            "num_running": scheduler.ring.num_held,
            "num_waiting": len(scheduler.queue),
            "batch": 0 if shape is None else shape.batch,
            "length": 0 if shape is None else shape.length,
            "kv_bytes": self.loop.kv_bytes,
        }

    def close(self) -> None:
        """Free the KV cache and fail unfinished queries with EngineClosedError. It may be called again."""
        self._guard.check_thread()
        self._is_closed = True
        for query in self.loop.queries.values():
            if not query.done:
                query.error = EngineClosedError("The engine was closed.")
        self.loop.forget()

    def __enter__(self) -> Self:
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
                "max_context_tokens, lengths and kv_bytes limit the length of a row",
                len(prompt),
                most,
            )
        check_params(params, self._limits, self._tokenizer, group="")
        if params.max_tokens == 0:
            raise InvalidRequestError("max_tokens", 0, "at least 1 in padded batches")
        if params.prompt_logprobs is not None:
            limit = "None in padded batches, which do not score prompts"
            raise InvalidRequestError("prompt_logprobs", params.prompt_logprobs, limit)
        if params.structured is not None:
            raise InvalidRequestError("structured", params.structured, "None in padded batches")
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
        """Fail all queries after an interrupt in mid-change, since the state may be inconsistent."""
        error = StepFailedError("An interrupt came in the middle of a step; all unfinished queries are lost.")
        self.loop.lose_everything(error)
