"""Checks that devices that share a model give one device's tokens, while KV leaves memory and comes back.

    python -m pensieve_lab.programs.check_parallel --tensor_parallel_size=4 --json=tokens.json
    python -m pensieve_lab.programs.check_parallel --tensor_parallel_size=2 --model=random:opt-tiny

A tiny model in float32 serves the same conversations on one device and on `--tensor_parallel_size`. Its two
tiers hold only a part of them, so that chunks are copied out and back, dropped and recomputed. Every token of
both must be the choice of the dense reference, which has one device and no cache, and the devices' tokens
must equal the one device's, except for ties, which rounding decides. A `random:<preset>` whose KV heads do
not divide over the devices gets one per device, with the same number of query heads per KV head.

The last line is one JSON document (see `--json`) with the number of each kind of move. The exit status is 1
if a token differs, or if some kind of move did not happen at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from model_defs import PRESETS, load_model, make_mesh, preset
from pensieve_jax import ConfigError, EngineConfig, SamplingParams
from pensieve_jax.commands.engine_flags import (
    TINY_MODEL,
    define_engine_flags,
    engine_config,
    model_limits,
    open_parts,
    refuse_sizes,
)
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.decoding.device.weights import serving_dtype
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference
from pensieve_jax.model_source import resolve_model
from pensieve_lab.serving.rounds import RoundsResult, Workload, make_workload, serve

FLAGS = flags.FLAGS
Figures = dict[str, Any]
UNITS = {"*_s": "seconds", "*_tokens": "tokens", "*_chunks": "times that a chunk was moved or lost"}
_RANDOM = "random:"
_PROMPT_TOKENS, _OUTPUT_TOKENS, _CONCURRENCY = 16, 16, 4
_GPU_SHARE, _CPU_SHARE = 0.3, 0.3  # of the memory that all conversations fill
_CHUNKS = {
    "num_swapped_out_chunks": "some state was copied out",
    "num_swapped_in_chunks": "some state was copied back",
    "num_dropped_chunks": "some state was dropped",
}
_TOKENS = ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens", "output_tokens")


class Judged(NamedTuple):
    """Tokens that the dense reference's logits do not choose, and those whose choice is too close to call."""

    num_wrong: int
    num_uncertain: int


def fit_heads(num_devices: int) -> None:
    """Give `--model` a KV head per device, if it is a preset whose heads do not divide."""
    name = FLAGS.model.removeprefix(_RANDOM)
    if not FLAGS.model.startswith(_RANDOM) or name not in PRESETS:
        return
    model = PRESETS[name]
    if model.num_kv_heads % num_devices:
        group = model.num_heads // model.num_kv_heads
        fitted = f"{name}-{num_devices}-kv-heads"
        PRESETS[fitted] = preset(name, num_heads=group * num_devices, num_kv_heads=num_devices)
        FLAGS["model"].value = _RANDOM + fitted


def sized(config: EngineConfig, workload: Workload, num_devices: int) -> EngineConfig:
    """Return a configuration on `num_devices` with two tiers that hold a part of the workload."""
    chunk_tokens = config.cache.chunk_tokens
    num_pages = -(-workload.num_tokens // chunk_tokens)
    longest = -(-workload.longest_tokens // chunk_tokens)
    return dataclasses.replace(
        config,
        cache=dataclasses.replace(
            config.cache,
            gpu_pages=max(int(_GPU_SHARE * num_pages), 2 * longest),
            cpu_pages=max(int(_CPU_SHARE * num_pages), longest),
        ),
        scheduler=dataclasses.replace(
            config.scheduler, max_num_running=_CONCURRENCY, max_num_batched_tokens=64, token_buckets=(64,)
        ),
        runner=dataclasses.replace(config.runner, tensor_parallel_size=num_devices, max_num_staged_pages=8),
    )


def serve_on(config: EngineConfig, workload: Workload) -> tuple[RoundsResult, Figures]:
    """Serve all conversations; return the results, and how often each kind of move happened."""
    start_s = time.perf_counter()
    with contextlib.closing(open_parts(config).engine) as engine:
        start_up_s = time.perf_counter() - start_s
        served = serve(engine, workload, _CONCURRENCY)
        engine.check_integrity()
    figures = served.figures()
    moved = {name: served.stats[name] for name in _CHUNKS}
    counters = {name: figures[name] for name in (*_TOKENS, "num_suspensions", "num_steps", "seconds")}
    return served, {"start_up_s": start_up_s, **moved, **counters}


def replies(served: RoundsResult) -> dict[str, list[list[int]]]:
    """Return the replies of each conversation, turn by turn."""
    found: dict[str, list[list[int]]] = {}
    for output in served.outputs:
        assert output.conversation_id is not None
        found.setdefault(output.conversation_id, []).append(list(output.token_ids))
    return found


def prompts(workload: Workload) -> dict[str, list[list[int]]]:
    """Return the prompts of each conversation, turn by turn."""
    found: dict[str, list[list[int]]] = {}
    for one_round in workload.prompts:
        for name, token_ids in one_round:
            found.setdefault(name, []).append(token_ids)
    return found


def whole(asked: list[list[int]], answered: list[list[int]]) -> list[int]:
    """Return a conversation's ids in order."""
    return [id for pair in zip(asked, answered, strict=True) for part in pair for id in part]


def judge(reference: DenseReference, workload: Workload, served: RoundsResult) -> Judged:
    """Judge every turn by a dense pass."""
    params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True)
    said, num_wrong, num_uncertain = replies(served), 0, 0
    for name, asked in prompts(workload).items():
        history: list[int] = []
        for prompt, reply in zip(asked, said[name], strict=True):
            replay = reference.replay_turn(history, prompt, reply, params)
            num_wrong += int((~replay.possible).sum())
            num_uncertain += int((replay.margins < MIN_MARGIN).sum())
            history = [*history, *prompt, *reply]
    return Judged(num_wrong, num_uncertain)


def different(
    reference: DenseReference, workload: Workload, one: RoundsResult, other: RoundsResult
) -> tuple[list[str], list[str]]:
    """Return conversations that differ where the choice was certain, and those that differ from a tie on."""
    wrong: list[str] = []
    tied: list[str] = []
    first, second = replies(one), replies(other)
    for name, asked in prompts(workload).items():
        if first[name] != second[name]:
            gap = reference.gap(whole(asked, first[name]), whole(asked, second[name]))
            (tied if gap < MIN_MARGIN else wrong).append(name)
    return wrong, tied


def dense_reference(workload: Workload) -> DenseReference:
    """Make the reference of the flags' model on one device, compiled for one length."""
    config = engine_config()
    model = load_model(
        resolve_model(FLAGS.model),
        dtype=serving_dtype(FLAGS.dtype),
        mesh=make_mesh(1),
        seed=config.runner.random_seed,
        max_position_embeddings=config.runner.max_position_embeddings,
        weights_dtype=config.runner.weights_dtype,
    )
    longest = 1 << (workload.longest_tokens - 1).bit_length()
    return DenseReference(model, min_padded_tokens=longest, min_padded_outputs=workload.output_tokens)


def check_flags() -> int:
    """Return the number of devices; raises ConfigError for flags that cannot be checked."""
    refuse_sizes("max_num_staged_pages", "stateful", "kv_dtype")
    num_devices: int = engine_config().runner.tensor_parallel_size
    if num_devices < 2:
        raise ConfigError("--tensor_parallel_size", num_devices, "at least 2, to be compared with one device")
    if serving_dtype(FLAGS.dtype) != "float32":
        limit = "float32: with less precision, rounding decides between tokens"
        raise ConfigError("--dtype", FLAGS.dtype, limit)
    for name, least in {"num_conversations": 4, "num_turns": 2}.items():
        if getattr(FLAGS, name) < least:
            raise ConfigError(f"--{name}", getattr(FLAGS, name), f"at least {least}")
    return num_devices


def make_prompts() -> Workload:
    """Make the flags' conversations; raises ConfigError if they exceed the context."""
    model, max_context_tokens = model_limits()
    workload = make_workload(
        num_conversations=FLAGS.num_conversations,
        num_turns=FLAGS.num_turns,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        vocab_size=model.vocab_size,
        seed=FLAGS.data_seed,
    )
    if workload.longest_tokens > max_context_tokens:
        limit = f"few enough for the context of {max_context_tokens} tokens"
        hint = f"a conversation comes to {workload.longest_tokens} tokens"
        raise ConfigError("--num_turns", FLAGS.num_turns, limit, hint)
    return workload


def checks(devices: Mapping[str, Figures], judged: Mapping[str, Judged], wrong: list[str]) -> dict[str, bool]:
    """Return the checks by name."""
    return {
        "tokens are those of one device": not wrong,
        "tokens are those of the dense reference": not any(one.num_wrong for one in judged.values()),
        **{
            words: all(figures[name] > 0 for figures in devices.values())
            for name, words in (_CHUNKS | {"recomputed_tokens": "some state was computed again"}).items()
        },
    }


def measure(num_devices: int) -> Figures:
    """Serve on one device and on all, and judge both."""
    fit_heads(num_devices)
    workload = make_prompts()
    served: dict[str, RoundsResult] = {}
    figures: dict[str, Figures] = {}
    for count in (1, num_devices):
        config = sized(engine_config(), workload, count)
        served[str(count)], figures[str(count)] = serve_on(config, workload)
    reference = dense_reference(workload)
    judged = {name: judge(reference, workload, one) for name, one in served.items()}
    wrong, tied = different(reference, workload, *served.values())
    return {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "num_devices": num_devices,
        "num_conversations": FLAGS.num_conversations,
        "num_turns": FLAGS.num_turns,
        "config": dataclasses.asdict(config),
        "devices": figures,
        "reference": {name: one._asdict() for name, one in judged.items()},
        "different_conversations": wrong,
        "tied_conversations": tied,
        "checks": checks(figures, judged, wrong),
    }


def main() -> int:
    results = measure(check_flags())
    names = [name for name in next(iter(results["devices"].values())) if not name.endswith("_s")]
    rows = [[count, *(one[name] for name in names)] for count, one in results["devices"].items()]
    print(table(["devices", *names], rows))
    rows = [[name, "met" if is_met else "MISSED"] for name, is_met in results["checks"].items()]
    print(table(["check", "result"], rows))
    print_document(json_line("parallel_tokens", results, units=UNITS, device=device_name()))
    return 0 if all(results["checks"].values()) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_integer("num_conversations", 8, "Conversations.")
    flags.DEFINE_integer("num_turns", 5, "Turns of each conversation.")
    flags.DEFINE_integer("data_seed", 0, "Seed of the prompts.", lower_bound=0)
    define_engine_flags(model=TINY_MODEL)
    FLAGS.set_default("dtype", "float32")
    FLAGS.set_default("chunk_tokens", 16)
    FLAGS.set_default("tensor_parallel_size", 2)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
