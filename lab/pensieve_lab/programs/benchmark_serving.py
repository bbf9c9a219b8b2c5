r"""Serves conversations in real time and reports the latency of answers over the load, system by system.

    python -m pensieve_lab.programs.benchmark_serving --model=random:llama2-13b-gqa10 --dtype=bfloat16 \
        --system=pensieve \
        --gpu_pages=6103 --cpu_bytes=60GB --think=exponential:20 --rates=1,2,3 --output_json=pensieve.json
    python -m pensieve_lab.programs.benchmark_serving --curves=pensieve.json,stateless.json --plot=curves.png
    python -m pensieve_lab.programs.benchmark_serving --curve="ours=a.json,b.json" \
        --curve="others=c.json" --level_ms=18 \
        --plot=curves.png

Open loop: users in their own thread send each turn when it is due, whatever the server does. Conversations
begin at random (`--rates`), with the pauses of a recording (`--arrivals`) or as recorded. Turn k + 1 follows
when turn k was answered and its user has thought. The run begins in mid-life (`--mid_life_s`), with the
histories of its conversations computed before the clock starts. Requests that arrive in the window count. The
run ends when all of them were answered, or after `--drain_s`. If users were late (99th percentile over
`--max_client_lag_s`) the run is void and the exit status 1, as it is if `--max_run_s` left no time for any
load point. Answers have the lengths of the trace, which no system uses to admit, evict or order turns.

Closed loop (`--closed_loop`): `--num_conversations` of `--num_turns` turns start at once, each next turn
follows its answer directly, and the total time is reported.

Systems, one per process (but see `--loads`), on the same memory:
  pensieve       KV cache in device and host memory (`--policy`, `--noprefetch`, `--noretrieval_priority` and
                 `--nounified` disable parts of it);
  pensieve-gpu   in device memory alone (the paper's "Pensieve (GPU cache)");
  stateless      every turn computes its whole history, with the same kernels and batching;
  http           `pensieve`, behind `pensieve serve`: front end and engine in their own processes;
  rebatching     a padded batch of `--padded_batch` rows that turns join and leave (Baton);
  rebatching-static
                 the same engine, whose batches run to their last turn (the Baton paper's "Benchmark");
  transformers   Hugging Face's continuous batching, if it can be imported;
  transformers-static
                 its `generate`, on batches of up to `--padded_batch` waiting turns, padded on the left;
  vllm, vllm-no-prefix, vllm-offload
                 vLLM, if it can be imported: with its prefix cache, without, and with host memory as well.
The last line is one JSON document (see `--json`); lab/docs/serving_benchmark.md defines every figure. Ctrl-C
ends the run after the current step; finished load points are in `--output_json`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from model_defs import ModelConfig
from pensieve_jax import ConfigError
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import TINY_MODEL, define_engine_flags, model_limits, shows_progress
from pensieve_jax.commands.launch import EXIT_FAILED, Interrupt, check_can_write, run
from pensieve_jax.commands.provenance import source_state
from pensieve_jax.commands.report import define_document_flag, json_line, print_document
from pensieve_lab.common.live_figures import LiveFigures
from pensieve_lab.serving.client import InlineClient, Prompts, ThreadedClient
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.serving.engine_server import EngineServer
from pensieve_lab.serving.figures import UNITS, figures
from pensieve_lab.serving.latency_plot import LATENCIES, View
from pensieve_lab.serving.load_points import (
    LoadPoint,
    all_arrivals,
    all_seeds,
    closed_loop,
    define_load_flags,
    open_loop,
    sessions_digest,
    systems_and_rates,
)
from pensieve_lab.serving.loop_profile import profile_loop
from pensieve_lab.serving.outcome import CLOSED_FLAGS, USERS_FLAGS, Outcome
from pensieve_lab.serving.report import BENCHMARK, Named, at_level, draw, named_curve, read_curves
from pensieve_lab.serving.request_table import request_table
from pensieve_lab.serving.run import System, serve
from pensieve_lab.serving.systems import (
    ENGINE_SYSTEMS,
    OURS,
    STORES_IN_8_BITS,
    SYSTEMS,
    VLLM_OFFLOAD,
    open_systems,
)
from pensieve_lab.workload import Client, History

FLAGS = flags.FLAGS
Point = dict[str, Any]
_NUM_CLOSED = 200  # conversations of a closed loop, unless --num_conversations says otherwise
_OPEN_FLAGS = (
    *("trace", "trace_format", "tokenizer", "workload", "loads", "rates", "arrivals", "seeds"),
    *("max_client_lag_s", "max_run_s", *USERS_FLAGS),
)
_CURVE_FLAGS = ("title", "level_ms", "top_ms", "latency")


def histories(load: LoadPoint, prompts: Prompts, between_steps: Callable[[], None]) -> Iterator[History]:
    """Yield the histories of conversations that begin in mid-life, in the order of their last answers."""
    begun = (session for session in load.sessions if session.first_turn)
    for session in sorted(begun, key=lambda session: session.last_active_s):
        between_steps()
        name = session.conversation.conversation_id
        num_tokens = session.num_history_tokens
        token_ids = prompts.of_history(name, num_tokens)
        yield History(name, num_tokens, min(session.last_active_s, 0.0), token_ids)


def measure(
    system: System,
    load: LoadPoint,
    number: int,
    model: ModelConfig,
    max_context_tokens: int,
    between_steps: Callable[[], None],
) -> Point:
    """Measure one load point, the `number`-th of this process; an error of `between_steps` ends it."""
    digest = sessions_digest(load.sessions)
    clock, users = RunClock(), Client(load.sessions, max_context_tokens)
    prompts = Prompts(model.vocab_size, load.seed, number)
    client = (InlineClient if FLAGS.closed_loop else ThreadedClient)(users, prompts, clock)
    title = system.label if load.rate is None else f"{system.label}, {load.rate:g}/s"
    start_s, shown = time.perf_counter(), shows_progress()
    server = system.start(clock)
    num_begun = sum(1 for session in load.sessions if session.first_turn)
    said = histories(load, prompts, between_steps)
    with tqdm(said, f"{title}: histories", num_begun, leave=False, disable=not shown) as bar:
        server.remember(bar)
    end_s = load.window.end_s if math.isfinite(load.window.end_s) else None
    preparation_s = time.perf_counter() - start_s
    num_compilations = server.counters().get("num_compilations")
    gc.collect()
    gc.freeze()  # models and sessions live on, so the collector need not scan them
    profile: Point = {}

    def afterwards(go_on: Callable[[], bool]) -> None:
        if FLAGS.profile_steps:
            assert isinstance(server, EngineServer)
            profile.update(profile_loop(server, go_on, FLAGS.profile_steps))

    with LiveFigures(title, end_s, shown=shown, refresh_every=1) as live:
        seen = serve(server, client, clock, load.window, live.see, between_steps, afterwards)
    gc.unfreeze()
    if FLAGS.step_table is not None:
        assert isinstance(server, EngineServer)
        server.save_steps(Path(FLAGS.step_table))
    # If users live in the server's thread, their time is part of the measurement.
    max_lag_s = math.inf if FLAGS.closed_loop else FLAGS.max_client_lag_s
    return {
        **load.name,
        "sessions_digest": digest,
        "num_mid_life": num_begun,
        "preparation_s": preparation_s,
        "num_compilations_before": num_compilations,
        "max_client_lag_s": max_lag_s if math.isfinite(max_lag_s) else None,
        "requests": request_table(seen),
        **figures(seen, max_lag_s),
        **({"profile": profile} if profile else {}),
    }


def check_flags() -> None:
    """Raise ConfigError for invalid flags before anything is loaded."""
    for name in ("warm_up_s", "window_s", "drain_s", "mid_life_s"):
        if not 0 <= getattr(FLAGS, name) < 1e9:
            raise ConfigError(f"--{name}", getattr(FLAGS, name), "a number of seconds from 0 on")
    if not FLAGS.max_client_lag_s > 0:
        raise ConfigError("--max_client_lag_s", FLAGS.max_client_lag_s, "above 0")
    if not FLAGS.stateful:
        raise ConfigError("--stateful", False, "left out: --system determines it")
    if FLAGS.system not in OURS and FLAGS.gpu_memory_fraction is not None:
        limit = f"left out for --system={FLAGS.system}, which gets as much memory as --gpu_pages says"
        raise ConfigError("--gpu_memory_fraction", FLAGS.gpu_memory_fraction, limit)
    if FLAGS.system not in OURS and FLAGS.gpu_pages is None:
        raise ConfigError("--gpu_pages", None, f"given for --system={FLAGS.system}, as its memory")
    if FLAGS.system not in STORES_IN_8_BITS and FLAGS.kv_dtype is not None:
        limit = f"left out for --system={FLAGS.system}, which stores state in --dtype"
        raise ConfigError("--kv_dtype", FLAGS.kv_dtype, limit)
    if FLAGS.system not in OURS and FLAGS.pack_host is not None:
        limit = f"left out for --system={FLAGS.system}, which packs nothing"
        raise ConfigError("--pack_host", FLAGS.pack_host, limit)
    if FLAGS.system != VLLM_OFFLOAD and FLAGS["vllm_offload_prompt_only"].present:
        limit = f"left out for --system={FLAGS.system}"
        raise ConfigError("--vllm_offload_prompt_only", FLAGS.vllm_offload_prompt_only, limit)
    for name in _CURVE_FLAGS:
        if FLAGS[name].present:
            raise ConfigError(f"--{name}", FLAGS[name].value, "left out without --curves or --curve")
    if FLAGS.output_json is not None:
        check_can_write("--output_json", Path(FLAGS.output_json))
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
        if not FLAGS.closed_loop and len(all_seeds()) * len(all_arrivals()) > 1:
            limit = "left out with several --seeds or --arrivals, which do not form one curve"
            raise ConfigError(
                "--plot", FLAGS.plot, limit, "lab/pensieve_lab/programs/compare_serving.py --plot draws them"
            )
    if FLAGS.step_table is not None:
        _check_engine_alone("--step_table", FLAGS.step_table)
        _check_step_table(FLAGS.step_table)
    if FLAGS.profile_steps:
        _check_engine_alone("--profile_steps", FLAGS.profile_steps)
        if FLAGS.closed_loop:  # no users are left when it ends
            raise ConfigError("--profile_steps", FLAGS.profile_steps, "left out beside --closed_loop")
    for name in _OPEN_FLAGS if FLAGS.closed_loop else CLOSED_FLAGS:
        if FLAGS[name].present:
            loop = "beside" if FLAGS.closed_loop else "without"
            raise ConfigError(f"--{name}", FLAGS[name].value, f"left out {loop} --closed_loop")
    if FLAGS.closed_loop:
        _check_closed_loop()


def _check_engine_alone(name: str, value: Any) -> None:
    """Refuse a flag that needs this engine in this process, and a single load point."""
    if FLAGS.system not in ENGINE_SYSTEMS:
        raise ConfigError(name, value, f"left out for --system={FLAGS.system}, whose steps are its own")
    if not FLAGS.closed_loop and len(systems_and_rates()) * len(all_seeds()) * len(all_arrivals()) > 1:
        raise ConfigError(name, value, "left out with several --rates, --loads, seeds or arrivals")


def _check_step_table(path: str) -> None:
    if not path.endswith(".npz"):
        raise ConfigError("--step_table", path, "a file that ends in .npz")
    check_can_write("--step_table", Path(path))


def _check_closed_loop() -> None:
    FLAGS.set_default("num_conversations", _NUM_CLOSED)
    for name in ("num_conversations", *CLOSED_FLAGS):
        if getattr(FLAGS, name) < 1:
            raise ConfigError(f"--{name}", getattr(FLAGS, name), "at least 1")
    _, max_context_tokens = model_limits()
    num_tokens = FLAGS.num_turns * (FLAGS.prompt_tokens + FLAGS.output_tokens)
    if num_tokens > max_context_tokens:
        raise ConfigError(
            "--num_turns",
            FLAGS.num_turns,
            f"few enough for the context of {max_context_tokens} tokens",
            f"a conversation comes to {num_tokens} tokens; lower this, --prompt_tokens or --output_tokens",
        )


def main() -> int:
    if FLAGS.curves or FLAGS.curve:
        return draw_curves()
    check_flags()
    if not source_state().tree_is_clean:  # warn before minutes of measuring
        print(
            "The source tree has no clean commit, so check_numbers will refuse this document.",
            file=sys.stderr,
        )
    model, max_context_tokens = model_limits()
    trace, loads = closed_loop() if FLAGS.closed_loop else open_loop(max_context_tokens)
    start_s = time.perf_counter()
    with contextlib.ExitStack() as open_now:
        systems = open_systems(model, {load.system for load in loads})
        for system in systems.values():
            open_now.enter_context(contextlib.closing(system))
        interrupt = open_now.enter_context(Interrupt())
        outcome = Outcome(systems, model, trace, time.perf_counter() - start_s)
        stop = functools.partial(stop_if_asked, interrupt)
        for number, load in enumerate(loads):
            if time.perf_counter() - start_s > FLAGS.max_run_s:
                outcome.leave_out(loads[number:])
                break
            outcome.add(load, measure(systems[load.system], load, number, model, max_context_tokens, stop))
        outcome.report()
    return EXIT_FAILED if outcome.has_failed else 0


def stop_if_asked(interrupt: Interrupt) -> None:
    """Raise KeyboardInterrupt between steps, where no thread is half done and no collector swallows it."""
    if interrupt.requested:
        raise KeyboardInterrupt


def draw_curves() -> int:
    """Draw `--curves` and `--curve` from files, without a run."""
    if FLAGS.plot is None:
        raise ConfigError("--plot", None, "given beside --curves or --curve: where the curves are drawn")
    check_can_plot("--plot", Path(FLAGS.plot))
    for name in ("level_ms", "top_ms"):
        given: float | None = getattr(FLAGS, name)
        if given is not None and not 0 < given < math.inf:
            raise ConfigError(f"--{name}", given, "above 0 milliseconds")
    files = [Named("--curves", None, tuple(map(Path, FLAGS.curves)))] if FLAGS.curves else []
    latency = LATENCIES[FLAGS.latency]
    title, curves = read_curves(files + [named_curve(text) for text in FLAGS.curve], latency)
    level_s, top_s = (None if ms is None else ms / 1e3 for ms in (FLAGS.level_ms, FLAGS.top_ms))
    view = View(level_s, top_s, latency)
    draw(curves, (FLAGS.title or title).replace("\\n", "\n"), Path(FLAGS.plot), view)
    results: dict[str, Any] = {"curves": curves, "plot": FLAGS.plot}
    if level_s is not None:
        results |= {"level_s": level_s, "requests_per_s_at_level": at_level(curves, level_s)}
    print(f"{', '.join(curves)}: drawn in {FLAGS.plot}")
    print_document(json_line(BENCHMARK, results, units=UNITS, device="none: files read"))
    return 0


def define_flags() -> None:
    flags.DEFINE_enum("system", "pensieve", SYSTEMS, "System that serves; see above.")
    flags.DEFINE_float(
        "max_client_lag_s", 0.010, "Seconds of user lag (99th percentile) above which a run is void."
    )
    flags.DEFINE_bool(
        "closed_loop", False, "Start all conversations at once, and send next turns directly after answers."
    )
    flags.DEFINE_string("output_json", None, "File to which every finished load point is appended.")
    flags.DEFINE_string(
        "step_table",
        None,
        "File (.npz) for a table of all steps of one load point; see serving/host_parts.py.",
    )
    flags.DEFINE_integer(
        "profile_steps",
        0,
        "Continue one load point for this many traced steps, then trace its commonest steps alone.",
        lower_bound=0,
    )
    flags.DEFINE_string("plot", None, "File for throughput-latency curves, e.g. curves.png.")
    flags.DEFINE_list("curves", [], "Draw --plot from these files of --output_json, without a run.")
    flags.DEFINE_multi_string("curve", [], "Like --curves, with a name for the curve: NAME=FILE,FILE.")
    flags.DEFINE_string(
        "title", None, "Title of --curves and --curve, with \\n between lines; default: model and trace."
    )
    flags.DEFINE_float("level_ms", None, "Draw a line at this latency, and report where curves cross it.")
    flags.DEFINE_float("top_ms", None, "Highest latency in the plot.")
    flags.DEFINE_enum("latency", "token", LATENCIES, "Latency that --curves and --curve draw.")
    flags.DEFINE_string(
        "transformers_attention",
        "paged|sdpa",
        "Attention of --system=transformers; plain sdpa becomes flash attention if transformers finds it.",
    )
    flags.DEFINE_bool(
        "vllm_offload_prompt_only",
        False,
        "Let --system=vllm-offload copy only prompts to host memory, as vLLM does by default: a reply gets "
        "there one turn late.",
    )
    flags.DEFINE_integer("padded_batch", 16, "Maximum rows of a padded batch.", lower_bound=1)
    flags.DEFINE_string(
        "decode_backend", "auto", "Attention back end of decode steps of --system=rebatching."
    )
    flags.DEFINE_list(
        "padded_lengths",
        [],
        "Row lengths to compile for --system=rebatching; default: its own choice.",
    )
    flags.DEFINE_float(
        "max_run_s",
        math.inf,
        "Start no load point after this many seconds since the start; the document lists the skipped ones.",
    )
    define_load_flags()
    define_engine_flags(model=TINY_MODEL)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
