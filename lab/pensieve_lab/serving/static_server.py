"""Hugging Face transformers' `generate` as a benchmark server: static batches, padded on the left.

Owns: which turns form a batch, its padding, and when each answer is complete.
Does not know: users or figures.

It is the baseline of the Baton paper ("Benchmark"): waiting turns become a batch when the previous batch has
ended, and a batch runs to its last token. As in section 5.1 of the paper, an answer counts as complete when
its own tokens are there, as a streamer reports; its row then idles. `generate` runs in its own thread.
Written for transformers 5.17, whose model configuration would supply an end of sequence if none was given.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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

SYSTEM = "transformers-static"
_POLL_S = 0.005  # as in `transformers_server`
_NO_ID = -1  # an end-of-sequence id that is never sampled
_PADDING_ID = 0
_WARM_UP_IDS = [3] * 8
_RANDOM = "random:"


class _Stopped(Exception):
    """The rest of a batch is no longer needed."""


class _BatchReport(NamedTuple):
    """Report of a batch's thread: ids of every row at a time, or how the batch ended."""

    ids: list[int] | None = None
    time_s: float = 0.0
    error: BaseException | None = None


class _Streamer:
    """Streamer of `generate`: receives the prompts first, then a token of every row per step."""

    def __init__(self, reports: queue.Queue[_BatchReport], stopped: threading.Event) -> None:
        self._reports, self._stopped = reports, stopped
        self._has_prompts = False

    def put(self, value: Any) -> None:
        """Report a step's tokens, which are in host memory."""
        if self._stopped.is_set():
            raise _Stopped
        if not self._has_prompts:
            self._has_prompts = True
            return
        self._reports.put(_BatchReport(value.reshape(-1).tolist(), time.perf_counter()))

    def end(self) -> None:
        """Do nothing: the last step was reported."""


class Batch:
    """Prompts in one call of `generate`, which runs in a thread."""

    def __init__(self, model: Any, torch: Any, config: Any, prompts: Sequence[Sequence[int]]) -> None:
        """Start generating. `config` is the call's `GenerationConfig`."""
        self._reports: queue.Queue[_BatchReport] = queue.Queue()
        self._stopped = threading.Event()
        ids, mask = padded_left(prompts)
        self._pool = ThreadPoolExecutor(1, "static batch")
        self._running = self._pool.submit(self._run, model, torch, config, ids, mask)
        # Pass an error on to the caller of `reports`.
        self._running.add_done_callback(
            lambda ended: self._reports.put(_BatchReport(error=ended.exception()))
        )

    def reports(self, timeout_s: float) -> list[_BatchReport]:
        """Return the reports that have come, after waiting `timeout_s` at most for the first."""
        found = []
        try:
            found.append(self._reports.get(timeout=timeout_s))
            while True:
                found.append(self._reports.get_nowait())
        except queue.Empty:
            return found

    def stop(self) -> None:
        """Stop the batch at its next token."""
        self._stopped.set()
        self._pool.shutdown()

    def _run(self, model: Any, torch: Any, config: Any, ids: list[list[int]], mask: list[list[int]]) -> None:
        with contextlib.suppress(_Stopped):
            model.generate(
                torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=config,
                streamer=_Streamer(self._reports, self._stopped),
            )


class StaticServer:
    """`Server` that runs one batch after the other."""

    def __init__(self, begin: Any, max_batch: int, max_tokens: int, clock: RunClock) -> None:
        """Start without turns; `begin` makes a `Batch` of prompts and a number of tokens."""
        self._begin, self._max_batch, self._max_tokens = begin, max_batch, max_tokens
        self.clock = clock
        self._transcripts = Transcripts()
        self._waiting: deque[tuple[UserTurn, list[int]]] = deque()
        self._batch: Batch | None = None
        self._rows: list[UserTurn | None] = []  # None: answered
        self._ids: list[list[int]] = []
        self._first_token_s = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + sum(turn is not None for turn in self._rows)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.num_unfinished)

    def remember(self, histories: Iterable[History]) -> None:
        """Keep the histories in the client's transcripts; the server stores none."""
        for history in histories:
            self._transcripts.add(history.conversation_id, history.token_ids)

    def submit(self, turn: UserTurn) -> None:
        self._waiting.append((turn, self._transcripts.add(turn.conversation_id, turn.token_ids)))

    def step(self, until_s: float) -> list[Answer]:
        if self._batch is None:
            self._begin_batch()
        assert self._batch is not None
        answers = []
        for report in self._batch.reports(_POLL_S):
            if report.ids is not None:
                answers += self._see(report.ids, self.clock.at(report.time_s))
            else:
                self._end_batch(report.error)
        return answers

    def counters(self) -> Mapping[str, float]:
        """Return nothing: transformers reports no counters."""
        return {}

    def steps(self) -> Steps:
        """Return nothing: transformers reports no steps."""
        return {}

    def stop(self) -> None:
        """Stop the running batch."""
        if self._batch is not None:
            self._batch.stop()

    def _begin_batch(self) -> None:
        """Start a batch of waiting turns in order, as many as rows and memory allow."""
        turns: list[UserTurn] = []
        prompts: list[list[int]] = []
        num_prompt = num_output = 0
        while self._waiting and len(turns) < self._max_batch:
            turn, transcript = self._waiting[0]
            num_prompt = max(num_prompt, len(transcript))
            num_output = max(num_output, turn.output_tokens)
            if turns and (len(turns) + 1) * (num_prompt + num_output) > self._max_tokens:
                break
            self._waiting.popleft()
            turns.append(turn)
            prompts.append(transcript)
        self._rows, self._ids = list(turns), [[] for _ in turns]
        self._batch = self._begin(prompts, max(turn.output_tokens for turn in turns))

    def _see(self, ids: Sequence[int], now_s: float) -> list[Answer]:
        """Take a token of every row; return the answers that it completes."""
        answers = []
        for row, (turn, one) in enumerate(zip(self._rows, ids, strict=True)):
            if turn is None:
                continue
            if not self._ids[row]:
                self._first_token_s = now_s  # the same for all of them
            self._ids[row].append(one)
            if len(self._ids[row]) == turn.output_tokens:
                self._rows[row] = None
                self._transcripts.add(turn.conversation_id, self._ids[row])
                answers.append(Answer(turn, 0, self._first_token_s, now_s, usage(turn, 0)))
        return answers

    def _end_batch(self, error: BaseException | None) -> None:
        self._batch = None
        if error is not None:
            raise BaselineError(f"transformers failed a batch: {error}") from error
        for turn, ids in zip(self._rows, self._ids, strict=True):
            if turn is not None:
                check_length(turn, ids)
        self._rows = []


class StaticSystem:
    """One model, for successive load points.

    Attributes:
      label: label of reports.
    """

    def __init__(
        self,
        source: str,
        model: ModelConfig,
        dtype: str,
        config: EngineConfig,
        attention: str,
        *,
        max_batch: int,
    ) -> None:
        """Load the model, or make one of random weights; raises ConfigError if transformers is missing.

        Args:
          source: resolved value of `--model`.
          model: configuration of the model.
          dtype: "float32", "bfloat16" or "float16".
          config: `cache` sets its memory, as rows times tokens with padding.
          attention: as in `TransformersSystem`; a "paged|" prefix is removed.
          max_batch: maximum rows of a batch.
        """
        self.label = SYSTEM
        self._torch = import_baseline(self.label, "torch")
        self._transformers = import_baseline(self.label, "transformers")
        self._max_batch = max_batch
        self._max_tokens = config.cache.num_gpu_pages * config.cache.chunk_tokens
        self._server: StaticServer | None = None
        self._device = "cuda" if self._torch.cuda.is_available() else "cpu"
        options = {
            "dtype": getattr(self._torch, dtype),
            "attn_implementation": attention.removeprefix("paged|"),
        }
        causal = self._transformers.AutoModelForCausalLM
        if source.startswith(_RANDOM):
            shape = self._transformers.AutoConfig.for_model(**hf_config(model, dtype))
            with self._torch.device(self._device):
                self._model = causal.from_config(shape, **options)
        else:
            self._model = causal.from_pretrained(source, device_map=self._device, **options)
        self._model.eval()

    def start(self, clock: RunClock) -> StaticServer:
        """Warm up, and start a server without a batch; the previous one is stopped."""
        self.close()
        warm_up = self._begin([_WARM_UP_IDS], 2)
        ended = False
        while not ended:
            for report in warm_up.reports(_POLL_S):
                if report.error is not None:
                    raise BaselineError(
                        f"transformers failed while warming up: {report.error}"
                    ) from report.error
                ended = ended or report.ids is None
        self._server = StaticServer(self._begin, self._max_batch, self._max_tokens, clock)
        return self._server

    def describe(self) -> dict[str, Any]:
        """Return versions and settings for a report."""
        return {
            "transformers": self._transformers.__version__,
            "torch": self._torch.__version__,
            "attention": self._model.config._attn_implementation,
            "max_batch": self._max_batch,
            "max_padded_tokens": self._max_tokens,
        }

    def device_name(self) -> str:
        """Return the kind of the device for reports."""
        return f"cuda: {self._torch.cuda.get_device_name(0)}" if self._device == "cuda" else "cpu"

    def close(self) -> None:
        """Stop the running batch."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _begin(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Batch:
        config = self._transformers.GenerationConfig(
            do_sample=False, eos_token_id=_NO_ID, pad_token_id=_PADDING_ID, max_new_tokens=num_tokens
        )
        return Batch(self._model, self._torch, config, prompts)


def padded_left(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return ids and mask of prompts that all end in the last column."""
    width = max(map(len, prompts))
    gaps = [width - len(prompt) for prompt in prompts]
    ids = [[_PADDING_ID] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)]
    mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
    return ids, mask
