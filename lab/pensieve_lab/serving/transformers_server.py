"""Hugging Face transformers' continuous batching as a benchmark server (written for transformers 5.17).

Owns: its set-up with the same memory, batch and model, and reading its results.
Does not know: users or figures.

Every turn sends its whole history. A request reuses cached blocks whose tokens match its prompt from the
beginning on, as long as other requests have not evicted them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model_defs import ModelConfig
from pensieve_jax import EngineConfig
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.serving.stateless_baselines import (
    BaselineError,
    Transcripts,
    check_length,
    hf_config,
    import_baseline,
    usage,
)
from pensieve_lab.workload import Answer, History, Steps, UserTurn

_POLL_S = 0.005  # a third of a step of typical models; bounds the delay of new turns
_NO_ID = -1  # an end-of-sequence id that is never sampled
_WARM_UP_IDS = [3] * 8
_BLOCK_TOKENS = 256  # transformers' default, required by some of its attention back ends
_RANDOM = "random:"


class TransformersServer:
    """`Server` on a running `ContinuousBatchingManager`, which has its own thread."""

    def __init__(self, manager: Any, clock: RunClock) -> None:
        """Take the manager, whose timestamps use the same timer as `clock`."""
        self._manager = manager
        self.clock = clock
        self._transcripts = Transcripts()
        self._turns: dict[str, UserTurn] = {}
        self._num_requests = 0
        self._num_found: dict[str, int] = {}  # cached tokens of a request's prompt
        self._note_what_is_found(manager.batch_processor.cache)

    @property
    def num_unfinished(self) -> int:
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._turns)

    def remember(self, histories: Iterable[History]) -> None:
        """Send every history once; the client keeps the transcripts."""
        num_left = 0
        for history in histories:
            self._transcripts.add(history.conversation_id, history.token_ids)
            self._add(history.token_ids, 1)
            num_left += 1
        while num_left:
            num_left -= len(self._results())

    def submit(self, turn: UserTurn) -> None:
        transcript = self._transcripts.add(turn.conversation_id, turn.token_ids)
        request_id = self._add(transcript, turn.output_tokens)
        self._turns[request_id] = turn

    def step(self, until_s: float) -> list[Answer]:
        return [self._answer(result) for result in self._results()]

    def counters(self) -> Mapping[str, float]:
        """Return nothing: transformers reports no counters."""
        return {}

    def steps(self) -> Steps:
        """Return nothing: transformers reports no steps."""
        return {}

    def _note_what_is_found(self, cache: Any) -> None:
        """Record the cache hits of prompts, which results do not report; the cache's thread calls this."""
        search = cache.search_prefix_match

        def noted(request_id: str, prompt_ids: list[int]) -> int:
            num_tokens: int = search(request_id, prompt_ids)
            if num_tokens:  # only the first lookup counts: an evicted request would also match its own answer
                self._num_found.setdefault(request_id, num_tokens)
            return num_tokens

        cache.search_prefix_match = noted

    def _add(self, token_ids: Sequence[int], num_tokens: int) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._manager.add_request(
            token_ids,
            request_id=request_id,
            max_new_tokens=num_tokens,
            record_timestamps=True,
            eos_token_id=_NO_ID,
        )
        return request_id

    def _results(self) -> list[Any]:
        """Wait at most `_POLL_S` for finished results; raises BaselineError if one failed."""
        results = []
        result = self._manager.get_result(timeout=_POLL_S)
        while result is not None:
            if result.error is not None:
                raise BaselineError(f"transformers failed a request: {result.error}")
            results.append(result)
            result = self._manager.get_result(timeout=0)
        if not results and not self._manager.is_running():
            raise BaselineError("transformers' generation thread ended before its time; its log says why.")
        return results

    def _answer(self, result: Any) -> Answer:
        turn = self._turns.pop(result.request_id)
        check_length(turn, result.generated_tokens)
        self._transcripts.add(turn.conversation_id, result.generated_tokens)
        first_token_s = self.clock.at(result.timestamps[0])
        num_found = self._num_found.pop(result.request_id, 0)
        return Answer(turn, 0, first_token_s, self.clock.now(), usage(turn, num_found))


class TransformersSystem:
    """One model, with a manager per load point.

    Attributes:
      label: label of reports.
    """

    def __init__(
        self, source: str, model: ModelConfig, dtype: str, config: EngineConfig, attention: str
    ) -> None:
        """Load the model, or make one of random weights; raises ConfigError if transformers is missing.

        Args:
          source: resolved value of `--model`.
          model: configuration of the model.
          dtype: "float32", "bfloat16" or "float16".
          config: `cache` and `scheduler` set its memory and batch size.
          attention: attention implementation, e.g. "flash_attention_2", or "paged|sdpa". Transformers
            replaces plain "sdpa" by flash attention if it finds it, or believes that it can download it.
        """
        self.label = "transformers"
        self._torch = import_baseline(self.label, "torch")
        self._transformers = import_baseline(self.label, "transformers")
        self._config = config
        self._manager: Any = None
        options = {"dtype": getattr(self._torch, dtype), "attn_implementation": attention}
        causal = self._transformers.AutoModelForCausalLM
        self._device = "cuda" if self._torch.cuda.is_available() else "cpu"
        if source.startswith(_RANDOM):
            values = hf_config(model, dtype)
            shape = self._transformers.AutoConfig.for_model(**values)
            with self._torch.device(self._device):
                self._model = causal.from_config(shape, **options)
        else:
            self._model = causal.from_pretrained(source, device_map=self._device, **options)

    def start(self, clock: RunClock) -> TransformersServer:
        """Start a manager with an empty cache; the previous one is stopped."""
        self.close()
        generation = import_baseline(self.label, "transformers.generation")
        cache, scheduler = self._config.cache, self._config.scheduler
        self._manager = self._model.init_continuous_batching(
            generation_config=generation.GenerationConfig(do_sample=False, eos_token_id=_NO_ID),
            continuous_batching_config=generation.ContinuousBatchingConfig(
                block_size=_BLOCK_TOKENS,
                num_blocks=cache.num_gpu_pages * cache.chunk_tokens // _BLOCK_TOKENS,
                max_batch_tokens=scheduler.max_num_batched_tokens,
                max_requests_per_batch=scheduler.running_limit,
            ),
        )
        self._manager.warmup()
        # Asynchronous batching needs a request to begin with.
        self._manager.add_request(_WARM_UP_IDS, request_id="warm-up", max_new_tokens=2, eos_token_id=_NO_ID)
        self._manager.start()
        while self._manager.get_result(timeout=_POLL_S) is None:
            if not self._manager.is_running():
                raise BaselineError(
                    "transformers' generation thread ended while warming up; its log says why."
                )
        return TransformersServer(self._manager, clock)

    def describe(self) -> dict[str, Any]:
        """Return versions and settings for a report."""
        return {
            "transformers": self._transformers.__version__,
            "torch": self._torch.__version__,
            "attention": self._model.config._attn_implementation,
        }

    def device_name(self) -> str:
        """Return the kind of the device for reports."""
        return f"cuda: {self._torch.cuda.get_device_name(0)}" if self._device == "cuda" else "cpu"

    def close(self) -> None:
        """Stop the manager, if one runs, and drop its unanswered requests."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=10, hard_stop=True)
