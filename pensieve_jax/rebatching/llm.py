"""User interface of padded batches: a model name and prompts (text or ids) in, ordered outputs out.

Owns: the start-up order, the encoding of prompts, and the keys of `PaddedLLM.describe`.
Does not know: how queries are scheduled, or how the described settings were chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from model_defs import make_mesh, source_config
from model_defs.registry import resolve_dtype
from pensieve_jax.core.errors import ConfigError, InvalidRequestError, TokenizerMissingError
from pensieve_jax.core.outputs import Output, all_results, one_each
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.device.describe import (
    Description,
    describe_choice,
    describe_devices,
    describe_model,
)
from pensieve_jax.decoding.device.weights import ProgressBar, load_weights, serving_dtype
from pensieve_jax.model_source import (
    DEFAULT_MODEL,
    resolve_model,
    source_tokenizer,
    with_tokenizer_end,
)
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.engine import RebatchingEngine
from pensieve_jax.rebatching.metrics import Observe, unobserved
from pensieve_jax.rebatching.query import Query
from pensieve_jax.runtime.compilation import keep_compilations_in
from pensieve_jax.runtime.host_memory import allow_pinning, available_bytes


class PaddedLLM:
    """Model that answers queries in one padded batch, which they join and leave while it runs.

    Use it from one thread at a time. Close it, or use it as a context manager.

    Attributes:
      engine: accepts queries one by one; see `RebatchingEngine`.
      model_config: configuration of the model.
      tokenizer: the model's tokenizer, or None.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        config: RebatchingConfig | None = None,
        progress: bool | None = None,
        observe: Observe = unobserved,
    ) -> None:
        """Load a model and compile all of its programs, so that serving compiles nothing.

        Args:
          model: as in `pensieve_jax.LLM`.
          dtype: as in `pensieve_jax.LLM`.
          config: sizes and limits.
          progress: show bars while loading, compiling and generating; None means on a terminal.
          observe: called after every step; see `metrics.StepSeen`.

        Raises:
          ConfigError: a value cannot work with this model or device, or the model is unknown.
          model_defs.ModelError: the checkpoint or the architecture cannot be served, for example because of
            a window that is shorter than the context.
        """
        config = config or RebatchingConfig()
        if not isinstance(config, RebatchingConfig):
            raise ConfigError("config", config, "a RebatchingConfig")
        self._progress = sys.stderr.isatty() if progress is None else progress
        source = resolve_model(model)
        model_config = source_config(source, config.max_position_embeddings)
        self.tokenizer = source_tokenizer(source, model_config.vocab_size)
        self.model_config = with_tokenizer_end(model_config, self.tokenizer)
        if config.compilation_cache_dir is not None:
            keep_compilations_in(config.compilation_cache_dir)
        allow_pinning(config.host_bytes, available_bytes())  # before JAX is used
        mesh = make_mesh(config.tensor_parallel_size)
        loaded = load_weights(
            source,
            dtype,
            mesh,
            seed=config.random_seed,
            max_position_embeddings=config.max_position_embeddings,
            progress=self._progress,
        )
        runner = DeviceRunner(loaded, config, mesh, resolve_dtype(serving_dtype(dtype), self.model_config))
        with ProgressBar("compiling", self._progress) as bar:
            runner.warm_up(bar)
        self._description = describe(str(model), runner, config)
        self.engine = RebatchingEngine(
            runner,
            config,
            tokenizer=self.tokenizer,
            eos_token_ids=self.model_config.eos_token_ids,
            observe=observe,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: int | Sequence[int] = 0,
    ) -> list[Output]:
        """Answer each prompt, and return the outputs in their order.

        Args:
          prompts: text or token ids.
          sampling_params: for all of them, or one each.
          priorities: for all of them, or one each; see `RebatchingEngine.submit`.

        All prompts are checked before any of them runs. An exception cancels the unfinished ones. Queries
        that were submitted earlier run meanwhile; `step` will not return those that finish during this call.

        Raises:
          InvalidRequestError, ContextLengthError, TokenizerMissingError: one prompt cannot be served.
          StepFailedError: the device failed twice with one query in the batch; `outputs` holds the others'.
          EngineClosedError: the engine was closed.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidRequestError("prompts", prompts, "a list of prompts", "put the prompt into a list")
        token_ids = [self._encode(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        params = one_each("sampling_params", sampling_params, SamplingParams(), len(prompts))
        ranks = one_each("priorities", priorities, 0, len(prompts), int)
        handles: list[Query] = []
        try:
            self.engine.submit_into(handles, token_ids, params, ranks)
            self._run(handles)
        finally:
            for handle in handles:
                if not handle.done:
                    self.engine.cancel(handle)
        return all_results(handles)

    def describe(self) -> Description:
        """Return the resolved settings: shapes of the batch, kernels, memory.

        The values are plain; printing shows one line each. `rebatching.llm.describe` documents the keys.
        """
        return self._description

    def stats(self) -> dict[str, int | float]:
        """Return the counters that `RebatchingEngine.stats` documents."""
        return self.engine.stats()

    def close(self) -> None:
        """Free the device memory. A second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, handles: Sequence[Query]) -> None:
        """Step until all `handles` are done."""
        unfinished = {handle for handle in handles if not handle.done}
        is_shown = self._progress and len(handles) > 1
        with tqdm(total=len(handles), desc="queries", disable=not is_shown, leave=False) as bar:
            while unfinished:
                ended = unfinished.intersection(self.engine.step())
                unfinished -= ended
                bar.update(len(ended))

    def _encode(self, prompt: Any, field: str) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt  # the engine checks it
        if self.tokenizer is None:
            raise TokenizerMissingError
        if not prompt:
            raise InvalidRequestError(field, prompt, "at least one token")
        return self.tokenizer.encode(prompt, add_bos=True)


def describe(name: str, runner: DeviceRunner, config: RebatchingConfig) -> Description:
    """Describe an engine by plain values that JSON can hold; printing shows one line each.

    Keys:
      model, device: as in `pensieve_jax.LLM.describe`; `name` is the model's name.
      kernels: `backend` and `reason` of `attention` (prefills) and of `decode` (steps).
      batch: the possible `shapes` of the ring, rows x columns, the shortest first; `unused_lengths` of the
        config, for which the budget cannot hold a row and a spare one; `max_context_tokens` of the longest
        query; `insertion`, `prefill` and `preemptive`.
      memory: `kv_bytes` of the budget and `token_bytes`, both per device, and `host_bytes` of pinned memory.
      compilation_cache_dir: directory of compiled programs, or None.
    """
    storage, ring_shapes = runner.storage, runner.ring_shapes
    return Description(
        {
            "model": describe_model(name, storage.model, storage.dtype, runner.weights_bytes),
            "device": describe_devices(runner.mesh),
            "kernels": {
                "attention": describe_choice(runner.backends.attention_backend),
                "decode": describe_choice(runner.backends.decode_backend),
            },
            "batch": {
                "shapes": [f"{shape.batch} x {shape.length}" for shape in ring_shapes.shapes],
                "unused_lengths": list(ring_shapes.unused_lengths),
                "max_context_tokens": ring_shapes.max_context_tokens,
                "insertion": config.insertion,
                "prefill": config.prefill,
                "preemptive": config.preemptive,
            },
            "memory": {
                "kv_bytes": ring_shapes.kv_bytes,
                "token_bytes": ring_shapes.token_bytes,
                "host_bytes": config.host_bytes,
            },
            "compilation_cache_dir": config.compilation_cache_dir,
        }
    )
