"""Simulates a workload on a device that is not present: the engine's real policy under virtual time.

    python -m pensieve_lab.programs.simulate --think=exponential:20 --rates=2,4,6,8 --plot=curves.png

Scheduler, cache, eviction policies and admission are the engine's own. A step and a copy take the time in a
device profile (`--profile`: one of the package, or a file). Users send turn k + 1 when turn k has been
answered and they have thought. The run begins in mid-life, warms up for `--warm_up_s` and counts for
`--window_s`. Systems:
  pensieve      KV cache in device and host memory;
  pensieve-gpu  in device memory alone (the paper's "Pensieve (GPU cache)");
  stateless     every turn computes its whole history.
Every eviction policy of `--policies` is run with each of the first two. `--replicas` engines share the load
by `--routing`: `affinity` (a conversation stays where it began), or `random` or `least-loaded` for each turn,
which recompute what other replicas had answered. The first table shows how the load was served. The second
shows where history was found, what moved, and the share of step time that was padding. The last line is one
JSON document (see `--json`). A rate takes some seconds per system if memory suffices, and a minute if not:
see `--progress`.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from model_defs import PRESETS, preset
from pallas_kernels.attention_names import KV_DTYPES
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pensieve_jax.assembly import cost_subject, estimated_cost_model
from pensieve_jax.cache import CostModel
from pensieve_jax.cache.order.cost import CostProfile, MeasuredCostModel
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import num_bytes, shows_progress
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.config import NUM_BUCKETS_GPU, POLICIES, PROMPT_ORDERS
from pensieve_jax.cost_choice import shipped_costs
from pensieve_lab.common.live_figures import LiveFigures
from pensieve_lab.common.session_flags import define_session_flags, load_trace, rates, sessions
from pensieve_lab.common.stored_profiles import stored_profile
from pensieve_lab.common.systems import STATELESS, SYSTEMS, system_config
from pensieve_lab.experiments.machines import find_profile, profile_help
from pensieve_lab.serving.report import curve, draw
from pensieve_lab.simulator import ROUTERS, DeviceProfile, Scenario, figures, simulate
from pensieve_lab.workload import UNITS, Session, Trace

FLAGS = flags.FLAGS
_SHIPPED = "shipped"
_COSTS = ("analytic", _SHIPPED)
_SPREADS = {"ms/token": "normalized_latency_s", "ttft ms": "first_token_s", "tpot ms": "output_token_s"}
_SERVED = {
    "requests/s": "requests_per_s",
    "tokens/s": "output_tokens_per_s",
    "tokens/step": "tokens_per_step",
}
_PARTS = {
    "normalized_latency_s": ("mean", "p50", "p90", "p99"),
    "first_token_s": ("mean", "p90", "p99"),
    "output_token_s": ("mean", "p99"),
}
_FOUND = {
    "gpu hits": "gpu_hit_rate",
    "cpu hits": "cpu_hit_rate",
    "recomputed": "recomputed_tokens",
    "wasted": "wasted_tokens",
    "suspended": "num_suspensions",
    "padding": "padding_share_of_step_time",
}
_SETTINGS = (
    *("think", "time_scale", "mid_life_s", "warm_up_s", "window_s", "seed", "replicas", "routing"),
    *(
        "gpu_bytes",
        "cpu_bytes",
        "kv_dtype",
        "kv_read_rate",
        "pack_host",
        "chunk_tokens",
        "max_num_running",
        "max_num_batched_tokens",
        "prompt_order",
        "target_tpot_ms",
        "prompt_steps",
    ),
    *("max_num_buckets", "max_context_tokens", "unified", "stretches"),
)


class Variant(NamedTuple):
    """Compared variant: a name, and an engine's configuration."""

    name: str
    config: EngineConfig


def systems(profile: DeviceProfile) -> list[Variant]:
    """Return the variants of the flags; raises ConfigError."""
    unknown = [name for name in FLAGS.systems if name not in SYSTEMS]
    if unknown or not FLAGS.systems:
        raise ConfigError("--systems", ",".join(FLAGS.systems), f"among {', '.join(SYSTEMS)}")
    unknown = [name for name in FLAGS.policies if name not in POLICIES]
    if unknown or not FLAGS.policies:
        raise ConfigError("--policies", ",".join(FLAGS.policies), f"among {', '.join(POLICIES)}")
    base = engine_config(profile)
    found = []
    for name in FLAGS.systems:
        for policy in FLAGS.policies if name != STATELESS else FLAGS.policies[:1]:
            config = dataclasses.replace(base, cache=dataclasses.replace(base.cache, policy=policy))
            label = name if len(FLAGS.policies) == 1 or name == STATELESS else f"{name}, {policy}"
            found.append(Variant(label, system_config(name, config)))
    return found


def engine_config(profile: DeviceProfile) -> EngineConfig:
    """Return the engine's configuration with both tiers; raises ConfigError."""
    page_bytes = FLAGS.chunk_tokens * profile.kv_token_bytes
    gpu_bytes = num_bytes("--gpu_bytes", FLAGS.gpu_bytes)
    least_bytes = max(-(-FLAGS.max_context_tokens // FLAGS.chunk_tokens), 2) * page_bytes
    if gpu_bytes < least_bytes:
        limit = f"at least {least_bytes:,} bytes, the KV cache of one sequence of --max_context_tokens"
        raise ConfigError("--gpu_bytes", FLAGS.gpu_bytes, limit)
    config = EngineConfig(
        cache=CacheConfig(
            gpu_pages=gpu_bytes // page_bytes,
            cpu_bytes=num_bytes("--cpu_bytes", FLAGS.cpu_bytes),
            chunk_tokens=FLAGS.chunk_tokens,
        ),  # the profile determines how the KV cache is stored
        scheduler=SchedulerConfig(
            max_num_running=FLAGS.max_num_running,
            max_num_batched_tokens=FLAGS.max_num_batched_tokens,
            prompt_order=FLAGS.prompt_order,
            target_tpot_ms=FLAGS.target_tpot_ms,
            prompt_steps=FLAGS.prompt_steps,
            max_num_buckets=FLAGS.max_num_buckets,
            max_context_tokens=FLAGS.max_context_tokens,
            unified=FLAGS.unified,
        ),
    )
    return config.with_cpu_pages(profile.host_chunk_bytes(FLAGS.chunk_tokens))


def stored(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile with the KV cache format of `--kv_dtype` and `--pack_host`; raises ConfigError."""
    if not FLAGS.kv_read_rate > 0:
        raise ConfigError("--kv_read_rate", FLAGS.kv_read_rate, "above 0")
    if FLAGS.kv_dtype is None and FLAGS.kv_read_rate != 1:
        raise ConfigError("--kv_read_rate", FLAGS.kv_read_rate, "left out without --kv_dtype")
    if FLAGS.kv_dtype is not None and profile.model not in PRESETS:
        limit = f"left out for a device profile of {profile.model!r}, which is not a preset"
        raise ConfigError("--kv_dtype", FLAGS.kv_dtype, limit)
    cache = CacheConfig(chunk_tokens=FLAGS.chunk_tokens, kv_dtype=FLAGS.kv_dtype, pack_host=FLAGS.pack_host)
    return stored_profile(profile, cache, read_rate=FLAGS.kv_read_rate)


def cost_model(profile: DeviceProfile) -> CostModel:
    """Return the cost model of `retention`: a measured profile if given, else an estimate for the model."""
    if FLAGS.cost_profile not in (None, *_COSTS):
        return MeasuredCostModel(CostProfile.load(FLAGS.cost_profile).points)
    if profile.model not in PRESETS:
        limit = f"given for a device profile of {profile.model!r}, which is not a preset"
        raise ConfigError("--cost_profile", FLAGS.cost_profile, limit)
    if FLAGS.cost_profile == _SHIPPED:
        return shipped_cost_model(profile)
    return estimated_cost_model(preset(profile.model), FLAGS.chunk_tokens)


def shipped_cost_model(profile: DeviceProfile) -> CostModel:
    """Return the costs that an engine on the simulated device finds in the package; raises ConfigError."""
    subject = cost_subject(
        preset(profile.model),
        dtype=profile.dtype,
        tensor_parallel_size=profile.num_devices,
        chunk_tokens=FLAGS.chunk_tokens,
        kv_dtype=FLAGS.kv_dtype,
    )
    device = profile.device.removeprefix(f"{profile.num_devices} x ").partition(" (")[
        0
    ]  # without the description of its links
    costs = shipped_costs(dataclasses.replace(subject, device=device))
    if costs is None:
        limit = "'analytic' or a file: the package has no costs of this model, device, dtype and chunk size"
        raise ConfigError("--cost_profile", _SHIPPED, limit)
    return costs.model


def scenario(profile: DeviceProfile, config: EngineConfig, costs: CostModel) -> Scenario:
    """Return the scenario of the flags; raises ConfigError."""
    return Scenario(
        config=config,
        profile=profile,
        cost_model=costs,
        max_context_tokens=config.resolve_context_tokens(FLAGS.max_context_tokens),
        num_replicas=FLAGS.replicas,
        routing=FLAGS.routing,
        seed=FLAGS.seed,
        warm_up_s=FLAGS.warm_up_s if FLAGS.window_s else 0.0,
        window_s=FLAGS.window_s or None,
        decode_runs=FLAGS.stretches,
    )


def measure(name: str, what: Scenario, who: list[Session], rate: float | None) -> dict[str, Any]:
    """Simulate one run; return its figures, and how fast it was simulated."""
    end_s = None if what.window_s is None else what.warm_up_s + what.window_s
    title = name if rate is None else f"{name}, {rate:g}/s"
    gc.collect()
    gc.freeze()  # sessions live on, so the collector need not scan them
    start_wall_s, start_s = time.perf_counter(), time.process_time()
    with LiveFigures(title, end_s, shown=shows_progress()) as live:
        outcome = simulate(what, who, live.see)
    seconds, wall_s = time.process_time() - start_s, time.perf_counter() - start_wall_s
    gc.unfreeze()
    return {
        "rate": rate,
        **figures(outcome, what.num_replicas),
        "simulated_requests": live.num_answers,
        "simulation_cpu_s": seconds,
        "simulation_wall_s": wall_s,
    }


def measure_all(profile: DeviceProfile, trace: Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield results system by system, rate by rate."""
    costs = cost_model(profile)
    run_s = FLAGS.warm_up_s + FLAGS.window_s if FLAGS.window_s else None
    for rate in rates():
        who = sessions(trace, rate, run_s)
        for name, config in systems(profile):
            yield name, measure(name, scenario(profile, config, costs), who, rate)


def served_row(name: str, figures: dict[str, Any]) -> list[object]:
    """Format how fast answers came; a dash stands for missing figures."""
    cells: list[object] = [
        name,
        _rate(figures),
        *("-" if figures[k] is None else figures[k] for k in _SERVED.values()),
    ]
    for key in _SPREADS.values():
        spread = figures[key]
        cells += [f"{1e3 * spread[part]:.1f}" if spread else "-" for part in _PARTS[key]]
    return cells


def found_row(name: str, figures: dict[str, Any]) -> list[object]:
    """Format where history was, what moved, and how fast that was simulated."""
    moved = [figures[key] / 1e9 for key in ("swapped_out_bytes", "swapped_in_bytes")]
    speed = round(figures["simulated_requests"] / max(figures["simulation_cpu_s"], 1e-9))
    cells = ("-" if figures[key] is None else figures[key] for key in _FOUND.values())
    return [name, _rate(figures), *cells, *moved, speed]


def _rate(figures: dict[str, Any]) -> str:
    return "recorded" if figures["rate"] is None else f"{figures['rate']:g}"


def check_flags() -> None:
    """Raise ConfigError for invalid flags."""
    for name in ("warm_up_s", "window_s", "mid_life_s"):
        if not 0 <= getattr(FLAGS, name) < 1e9:
            raise ConfigError(f"--{name}", getattr(FLAGS, name), "a number of seconds from 0 on")
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))


def main() -> int:
    check_flags()
    profile = stored(find_profile(FLAGS.profile))
    systems(profile)  # check the flags before the trace is made, which takes longer
    trace = load_trace(FLAGS.max_context_tokens)
    results: dict[str, list[dict[str, Any]]] = {}
    for name, found in measure_all(profile, trace):
        results.setdefault(name, []).append(found)
    report(profile, trace, results)
    return 0


def report(profile: DeviceProfile, trace: Trace, results: dict[str, list[dict[str, Any]]]) -> None:
    """Print the tables, draw the plot, and print the JSON line."""
    spreads = [f"{name} {part}" for name, key in _SPREADS.items() for part in _PARTS[key]]
    pairs = [(name, one) for name, found in results.items() for one in found]
    print(table(["system", "rate", *_SERVED, *spreads], [served_row(*pair) for pair in pairs]), end="\n\n")
    columns = ["system", "rate", *_FOUND, "GB out", "GB in", "simulated/CPU s"]
    print(table(columns, [found_row(*pair) for pair in pairs]))
    device = f"simulated: {FLAGS.replicas} x {profile.device}, {profile.model}, profile {profile.source}"
    print(f"{device}; {trace.name}, {trace.digest[:12]}")
    document = {
        "profile": {"name": FLAGS.profile, "source": profile.source, "provenance": profile.provenance},
        "trace": {"name": trace.name, "digest": trace.digest},
        "settings": {name: FLAGS[name].value for name in _SETTINGS},
        "systems": results,
    }
    if FLAGS.plot is not None:
        curves = {name: curve(found) for name, found in results.items()}
        draw(curves, f"{device}\n{trace.name}, think {FLAGS.think}", Path(FLAGS.plot))
    print_document(json_line("simulation", document, units=UNITS, device=device))


def define_flags() -> None:
    flags.DEFINE_string("profile", "h200_llama2-13b-gqa10", profile_help())
    flags.DEFINE_list("systems", list(SYSTEMS), f"Systems, among {', '.join(SYSTEMS)}.")
    flags.DEFINE_list("policies", ["retention"], f"Eviction policies, among {', '.join(POLICIES)}.")
    flags.DEFINE_string(
        "cost_profile",
        None,
        "Costs of recomputing: analytic (the default), shipped (the package's, as an engine on such a "
        "device uses them), or a file of profile_costs.py.",
    )
    flags.DEFINE_enum("kv_dtype", None, KV_DTYPES, "Data type of the KV cache; default: the profile's dtype.")
    flags.DEFINE_float(
        "kv_read_rate", 1.0, "With --kv_dtype: ratio of the read bandwidth of steps to the profile's."
    )
    flags.DEFINE_bool(
        "pack_host", None, "Pack chunks in host memory and in transit; default: as the engine would."
    )
    flags.DEFINE_string("gpu_bytes", "40GB", "Device memory for the KV cache of each replica.")
    flags.DEFINE_string("cpu_bytes", "60GB", "Host memory for the KV cache of each replica.")
    flags.DEFINE_integer("chunk_tokens", 32, "Tokens per page: 16, 32 or 64.")
    flags.DEFINE_integer("max_num_running", 256, "Maximum running requests.")
    flags.DEFINE_integer("max_num_batched_tokens", 2048, "Maximum query tokens per step.")
    flags.DEFINE_enum(
        "prompt_order",
        SchedulerConfig.prompt_order,
        PROMPT_ORDERS,
        "Which prompt of the batch a step computes first.",
    )
    flags.DEFINE_float(
        "target_tpot_ms",
        SchedulerConfig.target_tpot_ms,
        "Milliseconds per later token that running replies should take; steps follow it.",
    )
    flags.DEFINE_integer(
        "prompt_steps",
        SchedulerConfig.prompt_steps,
        "Steps over which prompts are spread while others decode; 0 disables this.",
    )
    flags.DEFINE_integer("max_num_buckets", NUM_BUCKETS_GPU, "Step sizes.")
    flags.DEFINE_bool("unified", True, "Prompts and decodes share steps; --nounified pauses decodes instead.")
    flags.DEFINE_integer("max_context_tokens", 16_384, "Maximum tokens of history and turn.")
    flags.DEFINE_integer("replicas", 1, "Number of engines, each on its own device.")
    flags.DEFINE_enum("routing", "affinity", sorted(ROUTERS), "Rule that chooses the replica of a turn.")
    flags.DEFINE_float("warm_up_s", 60.0, "Virtual seconds before the measured window.")
    flags.DEFINE_float(
        "window_s", 150.0, "Virtual seconds of the measured window; 0 serves the trace to its end."
    )
    flags.DEFINE_bool("stretches", True, "Simulate uneventful stretches faster, with the same results.")
    flags.DEFINE_string("plot", None, "File for a plot of the curves, e.g. curves.png; needs matplotlib.")
    flags.DEFINE_bool("progress", None, "Show a progress bar; default: on a terminal.")
    define_session_flags()
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
