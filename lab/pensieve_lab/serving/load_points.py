"""The load points of the serving benchmark, for all arrivals, seeds and rates of its flags.

Owns: their flags, including those of sessions, the conversion of flags to sessions and windows, which system
serves which load, and the digest that shows that two runs served the same load.
Does not know: what a system is. The caller parses the flags.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from absl import flags

from pensieve_jax import ConfigError
from pensieve_lab.common.session_flags import define_session_flags, load_trace, rates, sessions
from pensieve_lab.common.systems import SYSTEMS as ENGINE_SYSTEMS
from pensieve_lab.serving.run import Window
from pensieve_lab.workload import ConversationTrace, Session, Trace, TurnTrace

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_POISSON = "poisson"
_DIGITS = 6  # decimals of seconds in a digest: logarithms may differ in the last bit between machines


class LoadPoint(NamedTuple):
    """Load point: `rate` conversations arrive per second (None: as recorded, or at once), on `system`.

    `arrivals` is the file whose pauses between arrivals are used; None for Poisson arrivals.
    """

    system: str
    rate: float | None
    seed: int
    arrivals: str | None
    sessions: list[Session]
    window: Window

    @property
    def name(self) -> Mapping[str, Any]:
        """Rate, seed and arrivals, which identify it in documents."""
        return {"rate": self.rate, "seed": self.seed, "arrivals": self.arrivals}


def sessions_digest(sessions: Iterable[Session]) -> str:
    """Return SHA-256 in hex over arrivals, lengths of prompts and answers, and think times.

    Equal digests mean equal loads to the microsecond, whatever their files are called.
    """
    digest = hashlib.sha256()
    for session in sessions:
        conversation = session.conversation
        times = [round(float(time_s), _DIGITS) + 0.0 for time_s in (session.arrival_s, *session.think_s)]
        turns = [(turn.prompt_tokens, turn.output_tokens) for turn in conversation.turns]
        line = [conversation.conversation_id, session.first_turn, times, turns]
        digest.update(f"{json.dumps(line)}\n".encode())
    return digest.hexdigest()


def closed_loop() -> tuple[Trace, list[LoadPoint]]:
    """Make equal conversations that start at once and whose users do not think."""
    turns = (TurnTrace(FLAGS.prompt_tokens, FLAGS.output_tokens),) * FLAGS.num_turns
    count = FLAGS.num_conversations
    conversations = tuple(ConversationTrace(f"conversation-{i}", turns) for i in range(count))
    what = f"{FLAGS.num_turns} turns of {FLAGS.prompt_tokens} + {FLAGS.output_tokens} tokens"
    trace = Trace(f"closed loop: {count} conversations of {what}", conversations)
    think_s = (0.0,) * (FLAGS.num_turns - 1)
    who = [Session(conversation, 0.0, think_s) for conversation in conversations]
    return trace, [LoadPoint(FLAGS.system, None, FLAGS.seed, None, who, Window())]


def open_loop(max_context_tokens: int) -> tuple[Trace, list[LoadPoint]]:
    """Make the load points of the flags' trace for all arrivals, seeds, systems and rates.

    Raises ConfigError or a workload's error.
    """
    trace = load_trace(max_context_tokens)
    run_s, window = None, Window()
    if FLAGS.window_s:
        window = Window(FLAGS.warm_up_s, FLAGS.warm_up_s + FLAGS.window_s, FLAGS.drain_s)
        run_s = window.end_s + FLAGS.drain_s
    return trace, [
        LoadPoint(
            name, rate, seed, arrivals, sessions(trace, rate, run_s, seed=seed, arrivals=arrivals), window
        )
        for arrivals in all_arrivals()
        for seed in all_seeds()
        for name, rate in systems_and_rates()
    ]


def systems_and_rates() -> list[tuple[str, float | None]]:
    """Return the systems and rates to serve in sequence; raises ConfigError."""
    if not FLAGS.loads:
        return [(FLAGS.system, rate) for rate in rates()]
    for name in ("system", "rates", "recorded_arrivals"):
        if FLAGS[name].present:
            raise ConfigError(f"--{name}", FLAGS[name].value, "left out beside --loads")
    return list(named_loads())


def named_loads() -> list[tuple[str, float]]:
    """Parse `--loads`; raises ConfigError."""
    found: list[tuple[str, float]] = []
    for word in FLAGS.loads:
        name, _, text = word.partition(":")
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        if name not in ENGINE_SYSTEMS or not 0 < rate < math.inf:
            limit = f"SYSTEM:RATE with commas between them, systems among {', '.join(ENGINE_SYSTEMS)}"
            raise ConfigError("--loads", ",".join(FLAGS.loads), limit)
        found.append((name, rate))
    return found


def all_arrivals() -> list[str | None]:
    """Parse `--arrivals`, with None for a Poisson process; raises ConfigError."""
    words = FLAGS.arrivals
    if not words or (FLAGS["arrivals"].present and FLAGS.recorded_arrivals):
        limit = f"{_POISSON} or files, and left out beside --recorded_arrivals"
        raise ConfigError("--arrivals", ",".join(words), limit)
    return [None if word == _POISSON else word for word in words]


def all_seeds() -> list[int]:
    """Parse `--seeds`, or use `--seed` alone; raises ConfigError."""
    words = FLAGS.seeds or [str(FLAGS.seed)]
    if not all(word.isdecimal() for word in words):
        raise ConfigError("--seeds", ",".join(words), "numbers from 0 on, with commas between them")
    return [int(word) for word in words]


def define_load_flags() -> None:
    """Define the flags of open and closed loops."""
    flags.DEFINE_float("warm_up_s", 60.0, "Seconds before the measured window.")
    flags.DEFINE_float("window_s", 150.0, "Seconds of the measured window; 0 serves the trace to its end.")
    flags.DEFINE_float("drain_s", 60.0, "Seconds after the window for its last requests to end.")
    flags.DEFINE_integer("num_turns", 5, "Closed loop: turns of each conversation.")
    flags.DEFINE_integer("prompt_tokens", 38, "Closed loop: new prompt tokens of each turn.")
    flags.DEFINE_integer("output_tokens", 205, "Closed loop: tokens of each answer.")
    flags.DEFINE_list(
        "loads",
        [],
        "SYSTEM:RATE, in place of --system and --rates: several of this engine's systems alternate on one "
        "model, which is loaded once, and on the same pages, e.g. stateless:0.8,pensieve:0.8,pensieve:2.",
    )
    flags.DEFINE_list("seeds", [], "Seeds of sessions, in place of --seed; each rate is served with each.")
    flags.DEFINE_list(
        "arrivals",
        [_POISSON],
        "How conversations begin at --rates: poisson, or a trace file, e.g. Azure's, whose pauses between "
        "arrivals are scaled; several are served one after the other.",
    )
    define_session_flags()
