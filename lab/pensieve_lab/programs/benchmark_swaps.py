"""Cost of moving chunks between the tiers for concurrent steps, on the engine itself.

    python -m pensieve_lab.programs.benchmark_swaps --model=random:llama2-13b-gqa10 --dtype=bfloat16

- Bulk copies through the runner's transfers, against pinned-memory ceilings of the same run.
- The host's seconds for copies of 1 to 64 chunks, by kind of call.
- A history that is swapped in while a crowd decodes, against the same turn with its history on the device.
- Swap-outs at the rate at which the crowd fills pages, and in bursts.
- Retrieval priority and prefetch, on and off.
- An idle engine: the time to the first token with the history swapped in, on the device, and recomputed.

Compared variants alternate in one process; figures are medians. Pages of both tiers and step sizes follow
from the requested sizes. The last line is one JSON document (see `--json`). The exit status is 1 if a target
is missed, unless `--noenforce`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from pensieve_jax import ConfigError, EngineConfig
from pensieve_jax.assembly import Assembled
from pensieve_jax.commands.engine_flags import (
    TINY_MODEL,
    define_engine_flags,
    engine_config,
    open_parts,
    refuse_sizes,
)
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_lab.common.spread import Spread
from pensieve_lab.steps.bulk_copies import chunk_arrays, large_array, through_transfers
from pensieve_lab.steps.host_calls import host_calls
from pensieve_lab.steps.swap_windows import RETURNER, Return, Stage

FLAGS = flags.FLAGS
Figures = dict[str, Any]
_PARTS = ["host", "idle", "beside"]


def sized_config() -> EngineConfig:
    """Return the flags' engine with room for the crowd, the donors and the returning conversation."""
    refuse_sizes("swap_out_fraction")
    config = engine_config()
    chunk_tokens, chunks = config.cache.chunk_tokens, FLAGS.num_chunks
    returning = chunks * chunk_tokens + FLAGS.prompt_tokens + FLAGS.num_steps + 16
    max_context = max(FLAGS.context_tokens + FLAGS.max_crowd_tokens, returning)
    crowd_pages = FLAGS.num_decodes * -(-(FLAGS.context_tokens + FLAGS.max_crowd_tokens) // chunk_tokens)
    donor_chunks = num_donors() * chunks
    cache = dataclasses.replace(
        config.cache,
        gpu_pages=int((crowd_pages + donor_chunks + 4 * chunks) / 0.85),
        cpu_pages=donor_chunks + 4 * chunks,
        cpu_bytes=None,
        swap_out_fraction=0.0,  # only requested chunks move
    )
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_running=FLAGS.num_decodes + 1,
        max_num_rows=None,
        max_context_tokens=max_context,
        max_num_batched_tokens=longest_step(),
        token_buckets=None,
    )
    small = -(-(FLAGS.prompt_tokens + 8) // 16) * 16
    beside = -(-(FLAGS.num_decodes + FLAGS.prompt_tokens + 8) // 16) * 16
    buckets = sorted({small, beside, scheduler.max_num_batched_tokens})
    scheduler = dataclasses.replace(scheduler, token_buckets=tuple(buckets))
    return dataclasses.replace(config, cache=cache, scheduler=scheduler)


def num_donors() -> int:
    """Return the number of conversations of `num_chunks` chunks for all windows with swap-outs."""
    rate = FLAGS.num_repeats * FLAGS.num_steps * chunks_per_step()
    bursts = 2 * (FLAGS.num_repeats + 1) * FLAGS.num_chunks
    return -(-(rate + bursts) // FLAGS.num_chunks) + 1


def crowd_steps() -> int:
    """Return the steps that a crowd decodes in the longest part that begins with a fresh one."""
    if "beside" not in FLAGS.parts:
        return 0
    steps, repeats, settling = FLAGS.num_steps, FLAGS.num_repeats, 6
    swap_ins = (repeats + 1) * (2 * (steps + settling) + settling)
    swap_outs = 2 * repeats * (steps + settling)
    ablation = 2 * ((repeats + 1) // 2) * (steps + 3 * settling)
    # The first of the crowd decode while the prompts of the last are computed.
    joining = FLAGS.num_decodes * FLAGS.context_tokens // (longest_step() - FLAGS.num_decodes) + 1
    return max(swap_ins, swap_outs, ablation) + joining + 2 * settling


def longest_step() -> int:
    """Return the tokens of the longest step: the recomputed history, or the crowd with a chunk's prompt."""
    history = FLAGS.num_chunks * FLAGS.chunk_tokens + FLAGS.prompt_tokens + 16
    return max(history, FLAGS.num_decodes + 1 + FLAGS.chunk_tokens)


def chunks_per_step() -> int:
    """Return the number of pages that the crowd fills per step."""
    return max(FLAGS.num_decodes // FLAGS.chunk_tokens, 1)


def bulk(parts: Assembled) -> Figures:
    """Return bytes/s in each direction: one large array, arrays like chunks, chunks through the transfers."""
    runner, repeats = parts.runner, FLAGS.num_repeats
    num_bulk = 4 * FLAGS.num_chunks
    found = {
        "one large array": large_array(runner, num_bulk * runner.storage.slot_bytes, repeats),
        "arrays of the history": chunk_arrays(runner, FLAGS.num_chunks, repeats),
        "transfers": through_transfers(runner, num_bulk, repeats),
    }
    return {
        name: {
            "num_bytes": one.num_bytes,
            "to_host_s": one.to_host_s.as_dict(),
            "to_device_s": one.to_device_s.as_dict(),
            "bytes_per_s": one.bytes_per_s(),
        }
        for name, one in found.items()
    }


def idle_engine(stage: Stage) -> Figures:
    """Measure first tokens of a turn on an otherwise idle engine."""
    kinds: dict[str, list[Return]] = {"swapped in": [], "on the device": [], "recomputed": []}
    engine = stage.engine
    for _ in range(FLAGS.num_repeats + 1):  # the first of each warms up
        stage.away()
        kinds["swapped in"].append(stage.comes_back(0))
        kinds["on the device"].append(stage.comes_back(0))
        engine.forget_state(RETURNER)
        kinds["recomputed"].append(stage.comes_back(0))
        # Recomputing computes the history up to its last token, as the first computation did.
    return {
        name: {
            "first_token_s": Spread.of([one.first_token_s for one in returns[1:]]).as_dict(),
            "swapped_in_tokens": returns[-1].swapped_in_tokens,
            "recomputed_tokens": returns[-1].recomputed_tokens,
        }
        for name, returns in kinds.items()
    }


def compared(with_s: list[float], without_s: list[float], num_steps: int) -> Figures:
    """Compare alternating windows: by how much a window with copies is longer."""
    extra = Spread.of([a - b for a, b in zip(with_s, without_s, strict=True)])
    step = Spread.of([seconds / num_steps for seconds in without_s])
    return {
        "step_without_s": step.as_dict(),
        "extra_per_window_s": extra.as_dict(),
        "slowdown": extra.median / num_steps / step.median,
    }


def swap_ins(stage: Stage, transfers: DeviceTransfers) -> Figures:
    """Measure a history that comes back from the CPU tier, against the same one on the device."""
    steps = FLAGS.num_steps
    cold: list[Return] = []
    hot: list[Return] = []
    swapping = {"num_swap_in_copies": 0.0, "swap_dispatch_s": 0.0}
    for number in range(FLAGS.num_repeats + 1):
        # The order is A B B A, since steps get longer as the crowd's contexts grow; the first two warm up.
        for is_cold in (True, False) if number % 2 == 0 else (False, True):
            if is_cold:
                stage.away(pieces=1)
            before = transfers.stats()
            (cold if is_cold else hot).append(stage.comes_back(steps))
            after = transfers.stats()
            for figure in swapping:
                swapping[figure] += after[figure] - before[figure]
    cold, hot = cold[1:], hot[1:]
    returns = FLAGS.num_repeats + 1
    return compared([r.window_s for r in cold], [r.window_s for r in hot], steps) | {
        "swapped_in_tokens": cold[0].swapped_in_tokens,
        "steps_to_first_token": Spread.of([r.num_steps for r in cold]).as_dict(),
        "steps_to_first_token_without": Spread.of([r.num_steps for r in hot]).as_dict(),
        "first_token_s": Spread.of([r.first_token_s for r in cold]).as_dict(),
        "first_token_without_s": Spread.of([r.first_token_s for r in hot]).as_dict(),
        "num_copies": swapping["num_swap_in_copies"] / returns,
        "dispatch_s": swapping["swap_dispatch_s"] / returns,
    }


def swap_outs(stage: Stage, transfers: DeviceTransfers, action: Callable[[int], None]) -> Figures:
    """Measure windows whose steps each begin with `action(step number)`, against windows without."""
    steps, repeats = FLAGS.num_steps, FLAGS.num_repeats
    before = transfers.stats()
    with_s: list[float] = []
    without_s: list[float] = []
    for number in range(repeats):
        for is_with in (True, False) if number % 2 == 0 else (False, True):
            seconds = stage.window(steps, action if is_with else lambda _: None)
            (with_s if is_with else without_s).append(seconds)
    after = transfers.stats()
    return compared(with_s, without_s, steps) | {
        "num_copies_per_window": (after["num_swap_out_copies"] - before["num_swap_out_copies"]) / repeats,
        "dispatch_per_window_s": (after["swap_dispatch_s"] - before["swap_dispatch_s"]) / repeats,
    }


def ablation(stage: Stage, transfers: DeviceTransfers, name: str) -> Figures:
    """Measure the effect of `name`, retrieval priority or prefetch."""
    owner = transfers if name == "retrieval_priority" else stage.engine.cache
    returns: dict[bool, list[Return]] = {True: [], False: []}
    for number in range((FLAGS.num_repeats + 1) // 2):
        for value in (True, False) if number % 2 == 0 else (False, True):
            setattr(owner, name, value)
            stage.away(pieces=1)
            if name == "prefetch":
                returns[value].append(stage.comes_back_to_a_full_batch(FLAGS.num_steps))
            else:
                burst = lambda: stage.push_out(FLAGS.num_chunks)  # noqa: E731
                returns[value].append(stage.comes_back(FLAGS.num_steps, begin=burst))
    setattr(owner, name, True)
    return {
        "on" if value else "off": {
            "steps_to_first_token": Spread.of([r.num_steps for r in some]).as_dict(),
            "first_token_s": Spread.of([r.first_token_s for r in some]).as_dict(),
            "window_s": Spread.of([r.window_s for r in some]).as_dict(),
        }
        for value, some in returns.items()
    }


def beside_decoding(stage: Stage, transfers: DeviceTransfers) -> tuple[Figures, Figures]:
    """Measure swap-ins and swap-outs while a crowd decodes, and the effect of two switches."""

    def beside(part: Callable[[], Figures]) -> Figures:
        stage.start_crowd(FLAGS.num_decodes, FLAGS.context_tokens, FLAGS.max_crowd_tokens)
        found = part()
        stage.end_crowd()
        return found

    actions: dict[str, Callable[[int], None]] = {
        "swap-out at the rate of decoding": lambda number: stage.push_out(chunks_per_step()),
        "swap-out of a burst": lambda number: stage.push_out(0 if number else FLAGS.num_chunks),
    }
    decoding = {"swap-in": beside(lambda: swap_ins(stage, transfers))}
    for name, action in actions.items():
        decoding[name] = beside(functools.partial(swap_outs, stage, transfers, action))
    switches = ("retrieval_priority", "prefetch")
    return decoding, {name: beside(functools.partial(ablation, stage, transfers, name)) for name in switches}


def targets(figures: Figures) -> list[Figures]:
    """Return the targets with values and bounds, without those of skipped parts."""
    rows: list[tuple[str, float, float, bool]] = []
    rates = {name: one["bytes_per_s"] for name, one in figures["bulk"].items()}
    for way, rate in rates["transfers"].items():
        rows.append((f"bulk {way}, share of the ceiling", rate / rates["one large array"][way], 0.8, True))
    copy_s = figures["bulk"]["arrays of the history"]["to_device_s"]["median"]
    beside = figures.get("beside decoding")
    if beside:
        swap_in = beside["swap-in"]
        extra_steps = (
            swap_in["steps_to_first_token"]["median"] - swap_in["steps_to_first_token_without"]["median"]
        )
        rate = beside["swap-out at the rate of decoding"]
        share = swap_in["extra_per_window_s"]["median"] / copy_s
        rows += [
            ("swap-in, extra time as a share of its copy", share, 0.15, False),
            ("swap-in, more steps to the first token", extra_steps, 1, False),
            ("swap-out at the rate of decoding, slowdown", rate["slowdown"], 0.05, False),
            (
                "dispatch of a swap-in, share of a step",
                swap_in["dispatch_s"] / swap_in["step_without_s"]["median"],
                1,
                False,
            ),
        ]
    idle = figures.get("idle engine")
    if idle:
        first = {name: one["first_token_s"]["median"] for name, one in idle.items()}
        both = copy_s + first["on the device"]
        rows += [
            ("idle engine, first token / (copy + compute)", first["swapped in"] / both, 0.8, False),
            ("recomputing / swapping in", first["recomputed"] / first["swapped in"], 4, True),
        ]
    return [
        {
            "target": name,
            "value": value,
            "bound": bound,
            "met": value >= bound if at_least else value <= bound,
        }
        for name, value, bound, at_least in rows
    ]


def figures_table(figures: Figures) -> str:
    """Format medians in milliseconds, with quartiles."""
    rows = []
    for part, kinds in figures.items():
        for kind, one in kinds.items():
            for name, value in one.items():
                spreads = value if name in ("on", "off") else {name: value}
                for inner, spread in spreads.items():
                    if isinstance(spread, dict) and "median" in spread and inner.endswith("_s"):
                        label = inner if inner == name else f"{name}: {inner}"
                        rows.append(
                            [part, kind, label, *(1e3 * spread[key] for key in ("median", "low", "high"))]
                        )
    return table(["part", "what", "figure", "median, in ms", "low", "high"], rows)


def measure(parts: Assembled) -> Figures:
    """Measure all parts of the flags."""
    found: Figures = {"bulk": bulk(parts)}
    transfers = parts.runner.transfers
    assert isinstance(transfers, DeviceTransfers)
    if "host" in FLAGS.parts:
        most = min(FLAGS.max_num_staged_pages, 4 * FLAGS.num_chunks)  # limited by the number of slots
        nums_chunks = [1 << i for i in range(7) if 1 << i <= most]
        found["host"] = host_calls(parts.runner, nums_chunks, FLAGS.num_repeats)
    stage = Stage(
        parts.engine,
        parts.model_config.vocab_size,
        chunk_tokens=FLAGS.chunk_tokens,
        prompt_tokens=FLAGS.prompt_tokens,
    )
    stage.make_history(RETURNER, FLAGS.num_chunks * FLAGS.chunk_tokens)
    gc.collect()
    gc.freeze()  # as a server does with its start-up objects
    if "idle" in FLAGS.parts:
        found["idle engine"] = idle_engine(stage)
    if "beside" in FLAGS.parts:
        stage.make_donors(num_donors(), FLAGS.num_chunks)
        found["beside decoding"], found["ablations"] = beside_decoding(stage, transfers)
    gc.unfreeze()
    parts.engine.check_integrity()
    return found


def main() -> int:
    config = sized_config()
    needed = crowd_steps()
    if FLAGS.max_crowd_tokens < needed:
        limit = f"at least {needed}, about the steps of the windows of one part"
        raise ConfigError("--max_crowd_tokens", FLAGS.max_crowd_tokens, limit)
    start_s = time.perf_counter()
    parts = open_parts(config)
    start_up_s = time.perf_counter() - start_s
    found = measure(parts)
    checks = targets(found)
    parts.engine.close()
    print(figures_table(found))
    print(table(["target", "value", "bound", "met"], [list(check.values()) for check in checks]))
    document = {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "config": dataclasses.asdict(parts.config),
        "slot_bytes": parts.runner.storage.slot_bytes,
        "num_layer_groups": len(parts.runner.storage.groups),
        "start_up_s": start_up_s,
        **found,
        "targets": checks,
    }
    units = {
        "*_s": "seconds",
        "*_bytes": "bytes of all devices",
        "bytes_per_s": "bytes per second of all devices",
    }
    print_document(json_line("swaps", document, units=units, device=device_name()))
    return 0 if all(check["met"] for check in checks) or not FLAGS.enforce else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_multi_enum("parts", _PARTS, _PARTS, "Parts to measure in addition to bulk copies.")
    flags.DEFINE_integer("num_decodes", 128, "Sequences that decode during the swaps.", lower_bound=1)
    flags.DEFINE_integer("context_tokens", 800, "Initial context of each decoding sequence.", lower_bound=1)
    flags.DEFINE_integer(
        "max_crowd_tokens", 1000, "Maximum tokens that each of them may decode.", lower_bound=1
    )
    flags.DEFINE_integer(
        "num_chunks", 62, "Chunks of the returning history, and of a burst of swap-outs.", lower_bound=1
    )
    flags.DEFINE_integer("prompt_tokens", 38, "New tokens of the returning turn.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 8, "Steps per window.", lower_bound=2)
    flags.DEFINE_integer("num_repeats", 21, "Windows of each kind.", lower_bound=1)
    flags.DEFINE_bool("enforce", True, "Exit with 1 if a target is missed.")
    define_engine_flags(model=TINY_MODEL)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
