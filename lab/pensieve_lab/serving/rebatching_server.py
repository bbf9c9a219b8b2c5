"""A padded batch as a benchmark server: turns join and leave it (Baton), or each batch runs to its end.

Owns: its set-up with the same memory and model, when tokens are seen, and reading its results.
Does not know: users or figures.

It stores no conversations: every turn sends its whole history.
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
from pensieve_lab.serving.stateless_baselines import Transcripts, check_length, usage
from pensieve_lab.workload import Answer, History, Steps, UserTurn

SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "rebatching": {},
    "rebatching-static": {"insertion": "none", "prefill": "together"},
}
"""Configuration changes by name: Baton-PD, and the paper's Benchmark on the same engine."""


class RebatchingServer:
    """`Server` on a `RebatchingEngine`; `clock` is the run's clock."""

    def __init__(self, engine: RebatchingEngine, clock: RunClock) -> None:
        self._engine = engine
        self.clock = clock
        self._transcripts = Transcripts()
        self._turns: dict[Query, UserTurn] = {}
        self._silent: set[Query] = set()  # no token yet
        self._first_token_s: dict[Query, float] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._turns)

    def remember(self, histories: Iterable[History]) -> None:
        """Keep the histories in the client's transcripts; the server stores none."""
        for history in histories:
            self._transcripts.add(history.conversation_id, history.token_ids)

    def submit(self, turn: UserTurn) -> None:
        transcript = self._transcripts.add(turn.conversation_id, turn.token_ids)
        params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True)
        query = self._engine.submit(transcript, params)
        self._turns[query] = turn
        self._silent.add(query)

    def step(self, until_s: float) -> list[Answer]:
        ended = self._engine.step()
        now_s = self.clock.now()
        for query in [query for query in self._silent if query.token_ids or query.done]:
            self._silent.remove(query)
            self._first_token_s[query] = now_s
        return [self._answer(query, now_s) for query in ended]

    def counters(self) -> Mapping[str, float]:
        return self._engine.stats()

    def steps(self) -> Steps:
        """Return nothing: the engine does not report steps."""
        return {}

    def _answer(self, query: Query, now_s: float) -> Answer:
        token_ids = list(query.result().token_ids)
        turn = self._turns.pop(query)
        check_length(turn, token_ids)
        self._transcripts.add(turn.conversation_id, token_ids)
        return Answer(turn, 0, self._first_token_s.pop(query), now_s, usage(turn, 0))


class RebatchingSystem:
    """One model and its compiled programs, for successive load points.

    Attributes:
      label: label of reports.
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
          source: value of `--model`.
          model: configuration of the model.
          dtype: "auto", "float32", "bfloat16" or "float16".
          config: memory sizes, and the device settings that both engines share.
          max_batch: rows of the padded batch.
          lengths: row lengths that programs are compiled for; None lets the engine choose.
          decode_backend: attention back end of decode steps; part of the label unless "auto".
          progress: whether to show progress bars.
        """
        self.label = name if decode_backend == "auto" else f"{name}, {decode_backend}"
        cache, runner = config.cache, config.runner
        context = config.resolve_context_tokens(model.max_position_embeddings)
        least = 2 * (-(-context // PAGE_TOKENS) * PAGE_TOKENS)
        if cache.num_gpu_pages * cache.chunk_tokens < least:
            limit = f"at least {-(-least // cache.chunk_tokens)}, two rows of the longest context"
            raise ConfigError("--gpu_pages", cache.num_gpu_pages, limit, f"--max_context_tokens is {context}")
        kv_dtype = resolve_dtype(dtype, model)
        page_bytes = chunk_bytes(model, cache.chunk_tokens, kv_dtype)
        slot = slot_bytes(model, cache, kv_dtype)  # size of one of our pages in host memory
        self._config = RebatchingConfig(
            max_batch=max_batch,
            kv_bytes=cache.num_gpu_pages * page_bytes // runner.tensor_parallel_size,
            host_bytes=cache.cpu_bytes or cache.num_cpu_pages * slot // runner.tensor_parallel_size,
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
        # Compile now, as part of the start-up time.
        self._described = self._runners.runner(self._config).backends.describe()
        self._engine: RebatchingEngine | None = None

    def start(self, clock: RunClock) -> RebatchingServer:
        """Start an engine without queries; the previous one is closed."""
        self.close()
        self._engine = RebatchingEngine(self._runners.runner(self._config), self._config)
        return RebatchingServer(self._engine, clock)

    def describe(self) -> dict[str, Any]:
        """Return the configuration and back ends for a report."""
        return {"config": dataclasses.asdict(self._config), **self._described}

    def device_name(self) -> str:
        return device_name()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
