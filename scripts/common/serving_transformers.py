"""Hugging Face transformers' continuous batching as a server of a benchmark (written for transformers 5.17).

Owns: its set-up with the same memory, batch and model, and reading its results.
Does not know: users or figures. Called by: benchmark_serving, where transformers and torch can be imported.

It keeps nothing between requests: every turn sends, and computes, its whole history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from common.serving_clock import RunClock
from common.serving_peers import PeerError, Transcripts, check_length, hf_config, import_peer, usage
from common.serving_run import History, StepTotals
from model_defs import ModelConfig
from pensieve_jax import EngineConfig
from pensieve_jax.simulator import Answer, Turn

_POLL_S = 0.005  # a third of a step of the models meant here; it decides how soon new turns are handed over
_NO_ID = -1  # its word for an end of sequence that never comes
_WARM_UP_IDS = [3] * 8
_BLOCK_TOKENS = 256  # its default, which some of its attention back ends need
_RANDOM = "random:"


class TransformersServer:
    """A `Server` on a running `ContinuousBatchingManager`, which has a thread of its own."""

    def __init__(self, manager: Any, clock: RunClock) -> None:
        """Stamps of the manager are readings of the timer that `clock` counts by."""
        self._manager = manager
        self._clock = clock
        self._transcripts = Transcripts()
        self._turns: dict[str, Turn] = {}
        self._num_requests = 0

    @property
    def has_unfinished(self) -> bool:
        """See `Server`."""
        return bool(self._turns)

    def remember(self, histories: Iterable[History]) -> None:
        """See `Server`: the client remembers."""
        for history in histories:
            self._transcripts.add(history.conversation_id, history.token_ids)

    def submit(self, turn: Turn, token_ids: list[int]) -> None:
        """See `Server`."""
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._turns[request_id] = turn
        self._manager.add_request(
            self._transcripts.add(turn.conversation_id, token_ids),
            request_id=request_id,
            max_new_tokens=turn.output_tokens,
            record_timestamps=True,
            eos_token_id=_NO_ID,
        )

    def step(self) -> list[Answer]:
        """See `Server`."""
        answers = []
        result = self._manager.get_result(timeout=_POLL_S)
        while result is not None:
            answers.append(self._answer(result))
            result = self._manager.get_result(timeout=0)
        if not answers and not self._manager.is_running():
            raise PeerError("transformers' generation thread ended before its time; its log says why.")
        return answers

    def counters(self) -> Mapping[str, float]:
        """See `Server`: nothing is known."""
        return {}

    def steps(self) -> Mapping[int, StepTotals]:
        """See `Server`: nothing is known."""
        return {}

    def _answer(self, result: Any) -> Answer:
        if not result.is_finished():
            raise PeerError(f"transformers failed a request: {result.error}")
        turn = self._turns.pop(result.request_id)
        check_length(turn, result.generated_tokens)
        self._transcripts.add(turn.conversation_id, result.generated_tokens)
        first_token_s = self._clock.at(result.timestamps[0])
        return Answer(turn, 0, first_token_s, self._clock.now(), usage(turn, num_found=0))


class TransformersSystem:
    """One model; a manager for each load point.

    Attributes:
      label: of reports.
    """

    def __init__(
        self, source: str, model: ModelConfig, dtype: str, config: EngineConfig, attention: str
    ) -> None:
        """Load the model, or make one of random weights; raises ConfigError where that cannot be imported.

        Args:
          source: as of `--model`, resolved.
          model: its shape.
          dtype: "float32", "bfloat16" or "float16".
          config: `cache` and `scheduler` say how much memory and how large a batch it gets.
          attention: what computes attention, e.g. "sdpa" or "flash_attention_2".
        """
        self.label = "transformers"
        self._torch = import_peer(self.label, "torch")
        self._transformers = import_peer(self.label, "transformers")
        self._config = config
        self._attention = attention
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
        """A manager with an empty cache; the one before is stopped."""
        self.close()
        generation = import_peer(self.label, "transformers.generation")
        cache, scheduler = self._config.cache, self._config.scheduler
        self._manager = self._model.init_continuous_batching(
            generation_config=generation.GenerationConfig(do_sample=False, eos_token_id=_NO_ID),
            continuous_batching_config=generation.ContinuousBatchingConfig(
                block_size=_BLOCK_TOKENS,
                num_blocks=cache.gpu_pages * cache.chunk_tokens // _BLOCK_TOKENS,
                max_batch_tokens=scheduler.max_num_batched_tokens,
                max_requests_per_batch=scheduler.max_num_running,
            ),
        )
        self._manager.warmup()
        # Batching asynchronously it needs a request to begin with.
        self._manager.add_request(_WARM_UP_IDS, request_id="warm-up", max_new_tokens=2, eos_token_id=_NO_ID)
        self._manager.start()
        while self._manager.get_result(timeout=_POLL_S) is None:
            if not self._manager.is_running():
                raise PeerError("transformers' generation thread ended while warming up; its log says why.")
        return TransformersServer(self._manager, clock)

    def describe(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "transformers": self._transformers.__version__,
            "torch": self._torch.__version__,
            "attention": self._attention,
        }

    def device_name(self) -> str:
        """The kind of the device, for reports."""
        return f"cuda: {self._torch.cuda.get_device_name(0)}" if self._device == "cuda" else "cpu"

    def close(self) -> None:
        """Stop the manager, if one runs."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=10)
