"""Command-line flags for the workload: a trace, arrivals and think times.

Owns: names, defaults and help of these flags, and the sessions made from them.
Does not know: which system serves the sessions.
Called by programs, which register the flags as their own.
"""

from __future__ import annotations

import functools

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.help import flag_group
from pensieve_lab.common.trace_files import TOKENIZER_HELP, read_trace_file
from pensieve_lab.workload import (
    FORMATS,
    SHAPES,
    ExponentialThink,
    LognormalThink,
    RecordedThink,
    Session,
    ThinkTime,
    Trace,
    cap_context,
    from_first_arrival,
    generate_trace,
    make_sessions,
    start_mid_life,
)

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_MID_LIFE_TOKEN_S = 0.02  # time per answer token before the run: a system that is neither idle nor overloaded


@flag_group("the trace and its users")
def define_session_flags() -> None:
    """Define the flags of the trace and of its users."""
    flags.DEFINE_enum("workload", "sharegpt", sorted(SHAPES), "Distribution of generated conversations.")
    flags.DEFINE_integer("num_conversations", 20_000, "Generated conversations to draw sessions from.")
    flags.DEFINE_string("trace", None, "A trace file, instead of --workload.")
    flags.DEFINE_enum("trace_format", None, FORMATS, "Format of --trace; default: guessed from its fields.")
    flags.DEFINE_string("tokenizer", None, TOKENIZER_HELP)
    flags.DEFINE_list("rates", ["4"], "Conversations that begin per second (mean); several are swept.")
    flags.DEFINE_bool("recorded_arrivals", False, "Begin conversations at the trace's times, not by --rates.")
    flags.DEFINE_string(
        "think", "exponential:60", "exponential:MEAN_S, lognormal:MU,SIGMA, or recorded (by the trace)."
    )
    flags.DEFINE_float("time_scale", 1.0, "Factor for arrival and think times; 0.1 is ten times as fast.")
    flags.DEFINE_float("mid_life_s", 1800.0, "Begin this long after the first arrivals, in a steady state.")
    flags.DEFINE_integer("seed", 0, "Seed of all random draws.", lower_bound=0)


def rates() -> list[float | None]:
    """Return the rates of `--rates`, or only None for recorded arrivals; raises ConfigError."""
    if FLAGS.recorded_arrivals:
        if FLAGS["rates"].present:
            raise ConfigError("--rates", ",".join(FLAGS.rates), "left out beside --recorded_arrivals")
        return [None]
    try:
        found: list[float | None] = [float(word) for word in FLAGS.rates]
    except ValueError as error:
        raise ConfigError("--rates", ",".join(FLAGS.rates), "numbers with commas between them") from error
    if not found:
        raise ConfigError("--rates", "", "at least one number")
    return found


def load_trace(max_context_tokens: int) -> Trace:
    """Return the trace of the flags, capped at the context; raises ConfigError or a workload's error."""
    if FLAGS.trace is None:
        return generate_trace(
            SHAPES[FLAGS.workload],
            num_conversations=FLAGS.num_conversations,
            seed=FLAGS.seed,
            max_context_tokens=max_context_tokens,
        )
    if FLAGS["workload"].present:
        raise ConfigError("--workload", FLAGS.workload, "left out beside --trace")
    trace, _ = read_trace_file(FLAGS.trace, FLAGS.trace_format, FLAGS.tokenizer)
    return cap_context(trace, max_context_tokens)


def sessions(
    trace: Trace,
    rate: float | None,
    run_s: float | None,
    *,
    seed: int | None = None,
    arrivals: str | None = None,
) -> list[Session]:
    """Return the sessions of a run of `run_s` seconds, or of one that serves the whole trace.

    `seed` is `--seed` by default. `arrivals` is a trace file whose gaps are scaled to the rate; None is a
    Poisson process. Raises ConfigError for an unreadable file or a recording that ends before the run begins,
    or a workload's error.
    """
    if rate is None:
        trace = from_first_arrival(trace)
    think = think_time()
    mid_life_s = FLAGS.mid_life_s if run_s is not None else 0.0
    found = make_sessions(
        trace,
        rate_per_s=rate,
        recorded=trace if rate is None else _arrivals(arrivals),
        think=think,
        seed=FLAGS.seed if seed is None else seed,
        time_scale=FLAGS.time_scale,
        duration_s=None if run_s is None else mid_life_s + run_s,
    )
    if not mid_life_s:
        return found
    started = start_mid_life(found, at_s=mid_life_s, token_s=_MID_LIFE_TOKEN_S)
    if rate is None and not started:
        hint = "0 begins with its first arrival"
        raise ConfigError("--mid_life_s", mid_life_s, f"less than {trace.name} lasts", hint)
    return started


@functools.cache  # all rates share one file
def _arrivals(path: str | None) -> Trace | None:
    if path is None:
        return None
    trace, _ = read_trace_file(path, None, None, flag="--arrivals")
    return trace


def think_time() -> ThinkTime:
    """Return the think time of `--think`; raises ConfigError or WorkloadError."""
    kind, _, text = FLAGS.think.partition(":")
    try:
        values = [float(word) for word in text.split(",") if word]
    except ValueError:
        values = []
    match kind, values:
        case "exponential", [mean_s]:
            return ExponentialThink(mean_s)
        case "lognormal", [mu, sigma]:
            return LognormalThink(mu, sigma)
        case "recorded", [] if not text:
            return RecordedThink()
    raise ConfigError("--think", FLAGS.think, "exponential:MEAN_S, lognormal:MU,SIGMA or recorded")
