"""A padded batch as a server of a benchmark: turns join and leave it (Baton), or it runs to its end.

Owns: its set-up with the same memory and model, when tokens are seen, and reading its results.
Does not know: users or figures.

It keeps no conversations: every turn sends its whole history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from model_defs import ModelConfig
from model_defs.registry import resolve_dtype
from pensieve_jax import ConfigError, EngineConfig, SamplingParams
from pensieve_jax.commands.report import device_name
from pensieve_jax.device.kv_storage import chunk_bytes, slot_bytes
from pensieve_jax.rebatching import Query, RebatchingConfig, RebatchingEngine
from pensieve_jax.rebatching.config import PAGE_TOKENS
from pensieve_lab.rebatching.runners import Runners
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.serving.peers import Transcripts, check_length, usage
from pensieve_lab.workload import Answer, History, Steps, UserTurn

SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "rebatching": {},
    "rebatching-static": {"insertion": "none", "prefill": "together"},
}
"""By name, what of a configuration each changes: Baton-PD, and the paper's Benchmark on the same engine."""


class RebatchingServer:
    """A `Server` on a `RebatchingEngine`; `clock` is of the run."""

    def __init__(self, engine: RebatchingEngine, clock: RunClock) -> None:
        """Nothing has been said."""
        self._engine = engine
        self.clock = clock
        self._transcripts = Transcripts()
        self._turns: dict[Query, UserTurn] = {}
        self._silent: set[Query] = set()  # no token yet
        self._first_token_s: dict[Query, float] = {}

    @property
    def num_unfinished(self) -> int:
        """See `Server`."""
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        """See `Server`."""
        return bool(self._turns)

    def remember(self, histories: Iterable[History]) -> None:
        """See `Server`: the client remembers."""
        for history in histories:
            self._transcripts.add(history.conversation_id, history.token_ids)

    def submit(self, turn: UserTurn) -> None:
        """See `Server`."""
        transcript = self._transcripts.add(turn.conversation_id, turn.token_ids)
        params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True)
        query = self._engine.submit(transcript, params)
        self._turns[query] = turn
        self._silent.add(query)

    def step(self, until_s: float) -> list[Answer]:
        """See `Server`."""
        ended = self._engine.step()
        now_s = self.clock.now()
        for query in [query for query in self._silent if query.token_ids or query.done]:
            self._silent.remove(query)
            self._first_token_s[query] = now_s
        return [self._answer(query, now_s) for query in ended]

    def counters(self) -> Mapping[str, float]:
        """See `Server`."""
        return self._engine.stats()

    def steps(self) -> Steps:
        """See `Server`: nothing is known."""
        return {}

    def _answer(self, query: Query, now_s: float) -> Answer:
        token_ids = list(query.result().token_ids)
        turn = self._turns.pop(query)
        check_length(turn, token_ids)
        self._transcripts.add(turn.conversation_id, token_ids)
        return Answer(turn, 0, self._first_token_s.pop(query), now_s, usage(turn, 0))


class RebatchingSystem:
    """One model and its compiled programs, for one load point after the other.

    Attributes:
      label: of reports.
    """

    def __init__(
        self,
        name: str,
        source: str,
        model: ModelConfig,
        dtype: str,
        config: EngineConfig,
        *,
        max_batch: int,
        lengths: tuple[int, ...] | None,
        decode_backend: str = "auto",
        progress: bool,
    ) -> None:
        """Load and compile; raises ConfigError for memory of less than two rows, PensieveError or ModelError.

        Args:
          name: one of `SYSTEMS`.
          source: as of `--model`.
          model: its shape.
          dtype: "auto", "float32", "bfloat16" or "float16".
          config: says how much memory it gets, and of the device what both engines know.
          max_batch: rows of the padded batch.
          lengths: of a row, that programs are compiled for; None is what the engine chooses.
          decode_backend: what computes attention of steps; a part of the label, unless it is the engine's
            choice.
          progress: whether there are bars.
        """
        self.label = name if decode_backend == "auto" else f"{name}, {decode_backend}"
        cache, runner = config.cache, config.runner
        context = config.resolve_context_tokens(model.max_position_embeddings)
        least = 2 * (-(-context // PAGE_TOKENS) * PAGE_TOKENS)
        if cache.gpu_pages * cache.chunk_tokens < least:
            limit = f"at least {-(-least // cache.chunk_tokens)}, two rows of the longest context"
            raise ConfigError("--gpu_pages", cache.gpu_pages, limit, f"--max_context_tokens is {context}")
        kv_dtype = resolve_dtype(dtype, model)
        page_bytes = chunk_bytes(model, cache.chunk_tokens, kv_dtype)
        slot = slot_bytes(model, cache, kv_dtype)  # what pages of ours take there
        self._config = RebatchingConfig(
            max_batch=max_batch,
            kv_bytes=cache.gpu_pages * page_bytes // runner.tensor_parallel_size,
            host_bytes=cache.cpu_bytes or cache.cpu_pages * slot // runner.tensor_parallel_size,
            max_context_tokens=context,
            lengths=lengths,
            attention_backend=runner.attention_backend,
            decode_backend=decode_backend,
            tensor_parallel_size=runner.tensor_parallel_size,
            max_position_embeddings=runner.max_position_embeddings,
            random_seed=runner.random_seed,
            compilation_cache_dir=runner.compilation_cache_dir,
            **SYSTEMS[name],  # type: ignore[arg-type]
        )
        self._runners = Runners(source, dtype, self._config, progress=progress)
        # Compiled as a part of the start.
        self._described = self._runners.runner(self._config).backends.describe()
        self._engine: RebatchingEngine | None = None

    def start(self, clock: RunClock) -> RebatchingServer:
        """An engine without queries; the one before is closed."""
        self.close()
        self._engine = RebatchingEngine(self._runners.runner(self._config), self._config)
        return RebatchingServer(self._engine, clock)

    def describe(self) -> dict[str, Any]:
        """What a report says of it."""
        return {"config": dataclasses.asdict(self._config), **self._described}

    def device_name(self) -> str:
        """See `System`."""
        return device_name()

    def close(self) -> None:
        """Close the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
