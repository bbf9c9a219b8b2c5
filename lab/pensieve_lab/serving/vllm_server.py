"""vLLM (0.26 and 0.33) as a benchmark server: prefix cache on, off, or with host memory.

Owns: its set-up with the same memory, batch and model, and reading its results.
Does not know: users or figures.

It recognises a conversation by its tokens: every turn sends its whole history.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_defs import ModelConfig
from model_defs.registry import resolve_dtype
from pensieve_jax import ConfigError, EngineConfig
from pensieve_jax.device.kv_storage import slot_bytes
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

OFFLOAD = "vllm-offload"
SYSTEMS = ("vllm", "vllm-no-prefix", OFFLOAD)
_RANDOM = "random:"
_KV_DTYPES = {None: "auto", "float8_e4m3fn": "fp8"}  # vLLM's names of our types
_NUM_RESETS, _RESET_PAUSE_S = (
    20,
    0.1,
)  # pages of cancelled requests are freed only when their copies have ended


class _Request:
    """Submitted turn and its results."""

    def __init__(self, turn: UserTurn) -> None:
        self.turn = turn
        self.output_ids: list[int] = []
        self.first_token_s = 0.0
        self.num_found = 0


class VllmServer:
    """`Server` on an `LLMEngine`, stepped like our engine."""

    def __init__(self, engine: Any, params: Any, clock: RunClock, *, has_cache: bool) -> None:
        """Take the engine; `params` makes sampling parameters for a number of tokens."""
        self._engine = engine
        self._params = params
        self.clock = clock
        self._has_cache = has_cache
        self._transcripts = Transcripts()
        self._requests: dict[str, _Request] = {}
        self._num_requests = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def remember(self, histories: Iterable[History]) -> None:
        """Keep the transcripts, and with a prefix cache send every history once."""
        for history in histories:
            self._transcripts.add(history.conversation_id, history.token_ids)
            if self._has_cache:
                self._add(history.token_ids, 1)
        while self._has_cache and self._engine.has_unfinished_requests():
            self._engine.step()

    def submit(self, turn: UserTurn) -> None:
        transcript = self._transcripts.add(turn.conversation_id, turn.token_ids)
        request_id = self._add(transcript, turn.output_tokens)
        self._requests[request_id] = _Request(turn)

    def step(self, until_s: float) -> list[Answer]:
        outputs, now_s = self._engine.step(), self.clock.now()
        answers = []
        for output in outputs:
            request = self._requests[output.request_id]
            if not request.output_ids:
                request.first_token_s = now_s
                request.num_found = output.num_cached_tokens or 0
            request.output_ids += output.outputs[0].token_ids
            if output.finished:
                answers.append(self._answer(output.request_id, now_s))
        return answers

    def counters(self) -> Mapping[str, float]:
        """Return nothing: vLLM reports no counters."""
        return {}

    def steps(self) -> Steps:
        """Return nothing: vLLM reports no steps."""
        return {}

    def cancel(self) -> None:
        """Cancel all running requests."""
        if self._requests:
            self._engine.abort_request(list(self._requests))
            self._requests.clear()

    def _add(self, token_ids: Sequence[int], num_tokens: int) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, self._params(num_tokens))
        return request_id

    def _answer(self, request_id: str, now_s: float) -> Answer:
        request = self._requests.pop(request_id)
        turn = request.turn
        check_length(turn, request.output_ids)
        self._transcripts.add(turn.conversation_id, request.output_ids)
        return Answer(turn, 0, request.first_token_s, now_s, usage(turn, request.num_found))


class VllmSystem:
    """One engine, whose prefix cache is emptied for each load point.

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
        offload_prompt_only: bool = False,
    ) -> None:
        """Load the model, or make one of random weights.

        Args:
          name: one of `SYSTEMS`.
          source: resolved value of `--model`.
          model: configuration of the model.
          dtype: "float32", "bfloat16" or "float16".
          config: `cache` and `scheduler` set its memory and batch size.
          offload_prompt_only: vLLM's own default, by which a reply reaches host memory one turn late, as part
            of the next prompt.

        Raises ConfigError if vllm cannot be imported, there is no host memory to offload to, or vLLM does not
        support the data type of the pages.
        """
        self.label = f"{name}, prompts only" if name == OFFLOAD and offload_prompt_only else name
        self._has_host = name == OFFLOAD
        self._vllm = import_baseline(name, "vllm")
        self._sampling = import_baseline(name, "vllm.sampling_params")
        self._server: VllmServer | None = None
        cache, scheduler = config.cache, config.scheduler
        if cache.kv_dtype not in _KV_DTYPES:
            raise ConfigError("--kv_dtype", cache.kv_dtype, f"left out or float8_e4m3fn, for {name}")
        self._options: dict[str, Any] = {
            "model": source,
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "max_model_len": config.resolve_context_tokens(model.max_position_embeddings),
            "max_num_seqs": scheduler.running_limit,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "block_size": cache.chunk_tokens,
            "num_gpu_blocks_override": cache.num_gpu_pages,
            "kv_cache_dtype": _KV_DTYPES[cache.kv_dtype],
            "enable_prefix_caching": name != "vllm-no-prefix",
            "tensor_parallel_size": config.runner.tensor_parallel_size,
        }
        if self._has_host:
            slot = slot_bytes(model, cache, resolve_dtype(dtype, model))  # our page size in host memory
            cpu_bytes = cache.cpu_bytes or cache.num_cpu_pages * slot
            if not cpu_bytes:
                raise ConfigError("--cpu_bytes", cache.cpu_bytes, "given, or --cpu_pages, for vllm-offload")
            self._options |= {
                "kv_offloading_size": cpu_bytes / 2**30,
                "kv_offloading_backend": "native",
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"offload_prompt_only": offload_prompt_only},
                },
            }
        with tempfile.TemporaryDirectory() as directory:
            if source.startswith(_RANDOM):
                path = Path(directory) / "config.json"
                path.write_text(json.dumps(hf_config(model, dtype)), encoding="utf-8")
                self._options |= {"model": directory, "load_format": "dummy"}
            arguments = self._vllm.EngineArgs(**self._engine_options(name))
            self._engine = self._vllm.LLMEngine.from_engine_args(arguments)

    def start(self, clock: RunClock) -> VllmServer:
        """Return an engine with empty memory; requests of the load point before are cancelled.

        Raises:
          BaselineError: it could not be emptied.
        """
        self._cancel()
        self._empty()
        has_cache = bool(self._options["enable_prefix_caching"])
        self._server = VllmServer(self._engine, self._params, clock, has_cache=has_cache)
        return self._server

    def describe(self) -> dict[str, Any]:
        """Return the versions and options that a report names."""
        torch = import_baseline(self.label, "torch")
        return {"vllm": self._vllm.__version__, "torch": torch.__version__, "options": self._options}

    def device_name(self) -> str:
        """Return the kind of the device for reports."""
        torch = import_baseline(self.label, "torch")
        return f"cuda: {torch.cuda.get_device_name(0)}"

    def close(self) -> None:
        """Cancel running requests, and shut down the engine's process, which exit would wait for forever."""
        self._cancel()
        self._engine.engine_core.shutdown()

    def _engine_options(self, name: str) -> dict[str, Any]:
        """Return the options as `EngineArgs` takes them; vLLM writes into what it is given."""
        options = copy.deepcopy(self._options)
        if self._has_host:
            transfer_config = import_baseline(name, "vllm.config").KVTransferConfig
            options["kv_transfer_config"] = transfer_config(**options["kv_transfer_config"])
        return options

    def _empty(self) -> None:
        """Empty the caches. Without `reset_connector`, host memory would stay full."""
        for _ in range(_NUM_RESETS):
            is_empty = self._engine.reset_prefix_cache(
                reset_running_requests=False, reset_connector=self._has_host
            )
            if is_empty or self._server is None:  # nothing was cached before the first load point
                return
            time.sleep(_RESET_PAUSE_S)
        raise BaselineError(
            f"{self.label} did not empty its caches in {_NUM_RESETS} attempts. "
            "Run each load point in a process of its own: give --rates one value."
        )

    def _cancel(self) -> None:
        if self._server is not None:
            self._server.cancel()

    def _params(self, num_tokens: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=self._sampling.RequestOutputKind.DELTA,
        )
