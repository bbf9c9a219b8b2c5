"""Simulates what storing the KV cache would save on your trace, by serving it with and without on one GPU.

    python -m pensieve_lab.programs.simulate_serving --trace=conversation_trace.jsonl

reads BurstGPT's CSV, Mooncake's JSON lines, a directory of kv-cache-tester's sessions, ShareGPT, UltraChat
and more (docs/formats.md has the list); the format is guessed from the fields. It then serves one GPU's part
of the trace by three systems: `stateless` recomputes every history, `pensieve-gpu` keeps the KV cache in
device memory alone, and `pensieve` in device and host memory, of several sizes. The first lines say what that
saves: GPU time, prefill, first tokens, and requests per second within the target of `--level_ms` and
`--first_token_ms`. Tables show what each memory brings, how many requests per second and GPUs follow from it,
how long answers took and where histories were found. `--plot` draws them. The last line is one JSON document
(see `--json`).

Requests per second come from steady loads, without state and with three sizes of memory. The rate of each is
raised until a load misses the target, then `--tries` loads narrow the interval. The table shows both ends.

Settings that are not given are chosen and printed. The part has as many conversations as the stateless system
answers within `--level_ms` per token on average (`--share`), of at most about `--max_turns` turns. If the
trace has no arrivals, its conversations begin at a rate (`--rate`) that needs 70% of the GPU without state.
If even a few conversations take longer, that is printed. The device's memory is an eighth of their KV cache,
at most the 40 GB of the paper, and the host's 1, 2 and 4 times that. Steady loads have a whole GPU's 40 GB.
Scheduler, cache and eviction order are the engine's own, in virtual time: a step and a copy take the time in
`--profile`. `programs.simulate` sweeps loads, policies and replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import num_bytes, shows_progress
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document
from pensieve_jax.config import POLICIES
from pensieve_lab.common.systems import PENSIEVE, PENSIEVE_GPU, STATELESS, system_config
from pensieve_lab.common.trace_files import TOKENIZER_HELP, WORDS, read_trace_file
from pensieve_lab.experiments.machines import find_profile, profile_help
from pensieve_lab.experiments.recompute import cost_model
from pensieve_lab.simulation.capacity import (
    USUAL_SHARE,
    Figures,
    Load,
    Target,
    greatest_rate,
    load_at,
    usual_rate,
)
from pensieve_lab.simulation.memory import (
    GPU_BYTES,
    Memory,
    device_bytes,
    gigabytes,
    host_bytes,
    state_tokens,
)
from pensieve_lab.simulation.part import Part, Sampler, fitting_part
from pensieve_lab.simulation.picture import draw_savings
from pensieve_lab.simulation.savings import (
    UNITS,
    AtTarget,
    SystemResult,
    answer,
    headline,
    load,
    memory_table,
    request_table,
    savings_table,
)
from pensieve_lab.simulator import DeviceProfile, Scenario, figures, simulate
from pensieve_lab.workload import FORMATS, Session, Trace, cap_context, from_first_arrival
from pensieve_lab.workload import UNITS as SIMULATOR_UNITS

FLAGS = flags.FLAGS
_FIRST_STEP, _NEXT_STEP = 2.0, 1.4  # factors of the rate, without and with a neighbour's rate
_MAX_SYSTEMS = 4  # whose greatest loads are found
_LONG_CONTEXT_TOKENS = 16_384  # context from which pages are larger
_SETTINGS = (
    "level_ms",
    "first_token_ms",
    "tries",
    "time_scale",
    "seed",
    "policy",
    "max_context_tokens",
    "max_turns",
)


class Servers:
    """Systems on one simulated device.

    Attributes:
      max_context_tokens: maximum context of a conversation.
      chunk_tokens: tokens per page.
    """

    def __init__(self, profile: DeviceProfile, max_context_tokens: int) -> None:
        """Set up systems for contexts of up to `max_context_tokens`."""
        self._profile = profile
        self.max_context_tokens = max_context_tokens
        self.chunk_tokens = 32 if max_context_tokens <= _LONG_CONTEXT_TOKENS else 64
        self._costs = cost_model(profile, self.chunk_tokens, max_context_tokens)

    def serve(self, name: str, memory: Memory, sessions: Sequence[Session], title: str) -> SystemResult:
        """Serve until the last answer; raises ConfigError for memory that does not hold one context."""
        return SystemResult(name=name, memory=memory, figures=self._figures(name, memory, sessions, title))

    def at_load(self, name: str, memory: Memory, load: Load, title: str) -> dict[str, Any]:
        """Return the figures of a load's window."""
        return self._figures(name, memory, load.sessions, title, load)

    def _figures(
        self,
        name: str,
        memory: Memory,
        sessions: Sequence[Session],
        title: str,
        window: Load | None = None,
    ) -> dict[str, Any]:
        config = self._config(name, memory)
        scenario = Scenario(
            config=config,
            profile=self._profile,
            cost_model=self._costs,
            max_context_tokens=config.resolve_context_tokens(self.max_context_tokens),
            warm_up_s=0.0 if window is None else window.warm_up_s,
            window_s=None if window is None else window.window_s,
        )
        num_turns = sum(len(session.conversation.turns) for session in sessions)
        with tqdm(desc=title, total=num_turns, unit="turn", disable=not shows_progress(), leave=False) as bar:
            outcome = simulate(scenario, sessions, lambda answer: bar.update() and None)
        return figures(outcome, num_replicas=1)

    def _config(self, name: str, memory: Memory) -> EngineConfig:
        page_bytes = self.chunk_tokens * self._profile.kv_token_bytes
        config = EngineConfig(
            cache=CacheConfig(
                gpu_pages=memory.gpu_bytes // page_bytes,
                cpu_pages=memory.cpu_bytes // page_bytes,
                chunk_tokens=self.chunk_tokens,
                policy=FLAGS.policy,
            ),
            scheduler=SchedulerConfig(
                max_num_running=256,
                max_num_batched_tokens=2048,
                max_context_tokens=self.max_context_tokens,
            ),
        )
        return system_config(name, config)


def find_part(sampler: Sampler, servers: Servers, token_bytes: int) -> Part:
    """Return the part of the flags, or one that fits; raises ConfigError or a workload's error."""
    if FLAGS.rate is None and not sampler.has_arrivals and FLAGS.share is not None:
        raise ConfigError("--rate", None, "given beside --share, for a trace without arrivals")
    if FLAGS.share is not None or FLAGS.rate is not None:
        return sampler.part(FLAGS.share or sampler.share_of_turns(FLAGS.max_turns), FLAGS.rate)

    def stateless(sessions: Sequence[Session]) -> Mapping[str, Any]:
        memory = Memory(_gpu_bytes(sessions, token_bytes, servers), 0)
        return servers.serve(STATELESS, memory, sessions, "finding a load").figures

    def latency_s(sessions: Sequence[Session]) -> float:
        return float(stateless(sessions)["normalized_latency_s"]["mean"])

    def busy_s(sessions: Sequence[Session]) -> float:
        return float(stateless(sessions)["device_busy_s"])

    rate_per_s = math.inf
    if not sampler.has_arrivals:
        rate_per_s = usual_rate(sampler, sampler.share_of_turns(FLAGS.max_turns), busy_s)
    return fitting_part(sampler, FLAGS.max_turns, 1e-3 * FLAGS.level_ms, latency_s, rate_per_s)


def measure(servers: Servers, part: Part, token_bytes: int) -> Iterator[SystemResult]:
    """Yield the stateless system, the device alone, and both tiers from the smallest memory on."""
    gpu_bytes = _gpu_bytes(part.sessions, token_bytes, servers)
    hosts = [num_bytes("--cpu_bytes", text) for text in FLAGS.cpu_bytes] or host_bytes(gpu_bytes)
    systems = [(STATELESS, 0), (PENSIEVE_GPU, 0), *((PENSIEVE, cpu_bytes) for cpu_bytes in hosts)]
    for number, (name, cpu_bytes) in enumerate(systems, start=1):
        title = f"{name} ({number} of {len(systems)})"
        yield servers.serve(name, Memory(gpu_bytes, cpu_bytes), part.sessions, title)


def at_target(
    servers: Servers, sampler: Sampler, part: Part, served: Sequence[SystemResult], target: Target
) -> Iterator[AtTarget]:
    """Yield the greatest loads within the target: without state, on the device, and with most and least host.

    A system whose loads all miss the target is left out.
    """
    rate_per_s, step = (
        USUAL_SHARE * len(part.sessions) / max(served[0].figures["device_busy_s"], 1e-9),
        _FIRST_STEP,
    )
    systems = served if len(served) <= _MAX_SYSTEMS else [*served[: _MAX_SYSTEMS - 1], served[-1]]
    for number, one in enumerate(systems, start=1):
        memory = _whole_gpu(one.memory)
        title = f"requests/s: {one.name} ({number} of {len(systems)})"

        def figures_at(
            rate_per_s: float, name: str = one.name, memory: Memory = memory, title: str = title
        ) -> Figures:
            return servers.at_load(name, memory, load_at(sampler, part, rate_per_s), title)

        found = greatest_rate(figures_at, target, rate_per_s, FLAGS.tries, step)
        if found is not None:
            rate_per_s, step = found.rate_per_s, _NEXT_STEP  # more memory serves as much at least
            missed = None if found.missed is None else found.missed["requests_per_s"]
            yield AtTarget(one.name, memory, found.rate_per_s, found.figures["requests_per_s"], missed)


def _whole_gpu(memory: Memory) -> Memory:
    """Scale memory that was chosen for the part to a whole GPU's."""
    if FLAGS.gpu_bytes is not None:
        return memory
    times = max(GPU_BYTES / memory.gpu_bytes, 1)
    cpu_bytes = memory.cpu_bytes if FLAGS.cpu_bytes else round(times * memory.cpu_bytes)
    return Memory(round(times * memory.gpu_bytes), cpu_bytes)


def _gpu_bytes(sessions: Sequence[Session], token_bytes: int, servers: Servers) -> int:
    if FLAGS.gpu_bytes is None:
        return device_bytes(sessions, token_bytes, servers.max_context_tokens, servers.chunk_tokens)
    return num_bytes("--gpu_bytes", FLAGS.gpu_bytes)


def described(trace: Trace, format: str, part: Part, token_bytes: int) -> str:
    """Describe the served part of the trace in a few lines."""
    sessions = part.sessions
    num_turns = sum(len(session.conversation.turns) for session in sessions)
    tokens = state_tokens(sessions)
    conversations = f"{len(sessions):,} conversations"
    conversations = f"all {conversations}" if part.share == 1 else f"{part.of_all} them: {conversations}"
    arrivals = "as recorded" if part.rate_per_s is None else _rate(part, part.rate_per_s)
    pauses = "recorded" if part.has_pauses else "recorded where they are, else drawn, 60 s on average"
    times = "" if FLAGS.time_scale == 1 else f", all times x {FLAGS.time_scale:g}"
    whole = f"{len(trace.conversations):,} conversations, {trace.num_turns:,} turns"
    overloaded = (
        f"\nthe stateless system answers no tried part within {FLAGS.level_ms:g} ms/token; "
        "this is the smallest of them"
    )
    return (
        f"{trace.name}, read as {format}: {whole}\n"
        f"served: {conversations}, {num_turns:,} turns, which come to "
        f"{tokens:,} tokens of KV cache ({gigabytes(tokens * token_bytes)})\n"
        f"they begin {arrivals}; pauses are {pauses}{times}{overloaded if part.in_time is False else ''}"
    )


def _rate(part: Part, rate_per_s: float) -> str:
    asked = (
        "" if FLAGS.rate is not None else f", for up to {USUAL_SHARE:.0%} of the GPU without state (--rate)"
    )
    within_s = FLAGS.time_scale * len(part.sessions) / rate_per_s
    return f"at random, {rate_per_s:.3g} a second{asked}: all within {within_s:,.3g} s"


def main() -> int:
    if not 0 < FLAGS.time_scale < 1e6:
        raise ConfigError("--time_scale", FLAGS.time_scale, "a number above 0")
    if FLAGS.share is not None and not 0 < FLAGS.share <= 1:
        raise ConfigError("--share", FLAGS.share, "above 0 and at most 1")
    if not FLAGS.level_ms > 0:
        raise ConfigError("--level_ms", FLAGS.level_ms, "above 0")
    if FLAGS.first_token_ms is not None and not FLAGS.first_token_ms > 0:
        raise ConfigError("--first_token_ms", FLAGS.first_token_ms, "above 0")
    if FLAGS.max_turns < 1:
        raise ConfigError("--max_turns", FLAGS.max_turns, "at least 1")
    plot = None if FLAGS.plot is None else Path(FLAGS.plot)
    if plot is not None:
        check_can_plot("--plot", plot)
    profile = find_profile(FLAGS.profile)
    whole, format = read_trace_file(FLAGS.trace, FLAGS.trace_format, FLAGS.tokenizer)
    trace = cap_context(whole, FLAGS.max_context_tokens)
    if not trace.conversations:
        limit = "at least the length of a first turn of the trace"
        raise ConfigError("--max_context_tokens", FLAGS.max_context_tokens, limit)
    longest = max(conversation.num_tokens for conversation in trace.conversations)
    servers = Servers(profile, max(longest, 2))
    sampler = Sampler(trace=from_first_arrival(trace), time_scale=FLAGS.time_scale, seed=FLAGS.seed)
    part = find_part(sampler, servers, profile.kv_token_bytes)
    target = Target(FLAGS.level_ms, FLAGS.first_token_ms)
    served = list(measure(servers, part, profile.kv_token_bytes))
    loads = list(at_target(servers, sampler, part, served, target)) if FLAGS.tries else []
    print(headline(served, loads, str(target)), end="\n\n")
    print(described(whole, format, part, profile.kv_token_bytes), end="\n\n")
    print(memory_table(served), end="\n\n")
    if loads:
        print(f"within {target}, one GPU answers:\n{request_table(loads)}", end="\n\n")
    report(profile, trace, format, part, served, loads, plot)
    return 0


def report(
    profile: DeviceProfile,
    trace: Trace,
    format: str,
    part: Part,
    served: Sequence[SystemResult],
    loads: Sequence[AtTarget],
    plot: Path | None,
) -> None:
    """Print the table and the answer, draw the picture, and print the JSON line."""
    stateless = served[0]
    device = f"simulated: {profile.device}, {profile.model}, profile {profile.source}"
    print(savings_table(served), end="\n\n")
    print(answer(served))
    print(f"{load(stateless)} {device}")
    if plot is not None:
        draw_savings(served, f"{part.of_all} {trace.name} on {profile.device}, {profile.model}", plot)
        print(f"drawn: {plot}")
    document: dict[str, Any] = {
        "profile": {"name": FLAGS.profile, "source": profile.source, "provenance": profile.provenance},
        "trace": {"name": trace.name, "format": format, "digest": trace.digest},
        "part": {
            **{name: getattr(part, name) for name in ("share", "rate_per_s", "has_pauses", "in_time")},
            "num_sessions": len(part.sessions),
            "state_tokens": state_tokens(part.sessions),
        },
        "settings": {name: FLAGS[name].value for name in _SETTINGS},
        "at_target": [one.as_dict() for one in loads],
        "systems": [one.as_dict(stateless) for one in served],
    }
    print_document(json_line("savings", document, units=SIMULATOR_UNITS | UNITS, device=device))


def define_flags() -> None:
    flags.DEFINE_string("trace", None, "Trace file; for kv-cache-tester the directory.")
    require("trace")
    flags.DEFINE_enum("trace_format", None, FORMATS, "Format of the trace; default: guessed from its fields.")
    flags.DEFINE_string("tokenizer", WORDS, TOKENIZER_HELP)
    flags.DEFINE_string("profile", "h200_llama2-13b-gqa10", profile_help())
    flags.DEFINE_string("gpu_bytes", None, "Device memory for the KV cache, e.g. 40GB; default: chosen.")
    flags.DEFINE_list(
        "cpu_bytes", [], "Host memory sizes for the KV cache, separated by commas; default: chosen."
    )
    flags.DEFINE_float("share", None, "Share of the conversations; default: what fits --level_ms.")
    flags.DEFINE_float("rate", None, "Conversations per second; default: as recorded, or chosen.")
    flags.DEFINE_float("level_ms", 100.0, "Target: maximum mean ms/token, arrival to last token.")
    flags.DEFINE_float("first_token_ms", None, "Target: maximum mean ms to the first token; default: none.")
    flags.DEFINE_integer(
        "tries",
        1,
        "Loads that narrow the interval of requests/s within the target; 0 finds none.",
        lower_bound=0,
    )
    flags.DEFINE_integer("max_turns", 1000, "Approximate maximum turns of the part, unless --share is given.")
    flags.DEFINE_float("time_scale", 1.0, "Factor of recorded arrivals and pauses.")
    flags.DEFINE_enum("policy", CacheConfig().policy, POLICIES, "Eviction policy.")
    flags.DEFINE_integer(
        "max_context_tokens", 131_072, "Maximum context; conversations end before they exceed it."
    )
    flags.DEFINE_integer("seed", 0, "Seed of all random draws.", lower_bound=0)
    flags.DEFINE_string("plot", None, "File for the picture, e.g. savings.png; needs matplotlib.")
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
