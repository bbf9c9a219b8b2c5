"""Sessions: when each conversation starts, and how long its user thinks before each turn.

Owns: `Session`, Poisson and recorded arrivals, recorded arrivals rescaled to a rate, and starting
conversations in mid-life.
Does not know: engines or clocks. The driver of a session sends turn k+1 `think_s[k]` seconds after the end of
the answer of turn k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pensieve_lab.workload.checks import check_count, check_positive, check_time
from pensieve_lab.workload.errors import WorkloadError
from pensieve_lab.workload.think import ThinkTime
from pensieve_lab.workload.trace import ConversationTrace, Trace, unused_id


@dataclass(frozen=True, slots=True)
class Session:
    """Visit of one user: a conversation, its start, and the pauses in it.

    Attributes:
      conversation: all turns, those before `first_turn` included. Its id is unique among the sessions.
      arrival_s: when turn `first_turn` is sent, in seconds since the start of the run.
      think_s: `len(conversation.turns) - 1` values; think_s[k] is the time between the end of answer k and
        the arrival of turn k + 1.
      first_turn: index of the first turn that is sent. Above 0 the session starts in mid-life: the turns
        before it were served before the run, and their `num_history_tokens` tokens may be in the cache,
        idle since `last_active_s`.
    """

    conversation: ConversationTrace
    arrival_s: float
    think_s: tuple[float, ...]
    first_turn: int = 0

    def __post_init__(self) -> None:
        """Raise WorkloadError for times below 0, too few think times, or a first turn that does not exist."""
        check_time("arrival_s", self.arrival_s)
        num_turns = len(self.conversation.turns)
        if len(self.think_s) != num_turns - 1:
            raise WorkloadError("think_s", self.think_s, f"{num_turns - 1} values, one between any two turns")
        for index, think_s in enumerate(self.think_s):
            check_time(f"think_s[{index}]", think_s)
        check_count("first_turn", self.first_turn, at_least=0)
        if self.first_turn >= num_turns:
            raise WorkloadError("first_turn", self.first_turn, f"below {num_turns}, the number of turns")

    @property
    def num_history_tokens(self) -> int:
        """Tokens of the turns before the session begins; 0 unless it starts in mid-life."""
        return self.conversation.num_history_tokens(self.first_turn)

    @property
    def last_active_s(self) -> float:
        """End of the answer before `first_turn`, negative before the run; `arrival_s` without such an
        answer."""
        return self.arrival_s - (self.think_s[self.first_turn - 1] if self.first_turn else 0.0)


def make_sessions(
    trace: Trace,
    *,
    rate_per_s: float | None = None,
    recorded: Trace | None = None,
    think: ThinkTime,
    seed: int,
    time_scale: float = 1.0,
    num_sessions: int | None = None,
    duration_s: float | None = None,
) -> list[Session]:
    """Make sessions in order of arrival; the same arguments give the same sessions.

    Arrivals, think times and the order of conversations have separate random streams. With one seed, another
    rate moves the arrivals of the same sessions with the same think times, and a shorter run is a prefix of a
    longer one.

    Args:
      trace: source of the conversations, in random order. All are used before one is used again; from then on
        its id ends in "@2", "@3" and so on.
      rate_per_s: rate of Poisson arrivals in sessions per second, as in the paper's evaluation.
      recorded: trace whose recorded arrivals are used instead. `trace` itself: each conversation at its own
        time. Another trace: its arrivals only. With `rate_per_s`, only the pauses between the arrivals of
        either are used, cyclically from a random one on, scaled so that their mean gives that rate. Bursts
        keep their shape.
      think: distribution of think times.
      seed: seed of all random draws.
      time_scale: factor of every arrival and think time; 0.1 makes time run ten times as fast.
      num_sessions: maximum number of sessions. None means every recorded arrival or, for arrivals at a rate
        without `duration_s`, one session per conversation of the trace.
      duration_s: only sessions that arrive before this time of the run, after scaling.

    Raises WorkloadError for impossible or contradictory arguments, or a time that was not recorded.
    """
    _check_arguments(trace, time_scale, num_sessions, duration_s)
    check_count("seed", seed, at_least=0)
    order_rng, arrival_rng, think_rng = np.random.default_rng(seed).spawn(3)
    arrivals = _arrivals(trace, rate_per_s, recorded, order_rng, arrival_rng)
    if rate_per_s is not None and num_sessions is None and duration_s is None:
        num_sessions = len(trace.conversations)
    sessions: list[Session] = []
    for time_s, conversation in itertools.islice(arrivals, num_sessions):
        arrival_s = time_s * time_scale
        if duration_s is not None and arrival_s >= duration_s:
            break
        think_s = tuple(value * time_scale for value in think.draw(conversation, think_rng))
        sessions.append(Session(conversation, arrival_s, think_s))
    return sessions


def start_mid_life(sessions: Sequence[Session], *, at_s: float, token_s: float) -> list[Session]:
    """Start sessions as a run that begins at `at_s` finds them: in a steady state from its first minute.

    For sessions that began before, the turns sent by then become history, and the session continues with its
    next turn. Sessions without a further turn are dropped. `at_s` should be many times the length of a
    conversation.

    Args:
      sessions: sessions from time 0 on, in order of arrival, none in mid-life.
      at_s: beginning of the run, which becomes time 0.
      token_s: seconds per output token, which determine how far a conversation had come by then.

    Raises WorkloadError for a negative time, or a session that already starts in mid-life.
    """
    check_time("at_s", at_s)
    check_time("token_s", token_s)
    started: list[Session] = []
    for session in sessions:
        if session.first_turn:
            raise WorkloadError("first_turn", session.first_turn, "0 in sessions that are to be cut")
        sent_s = session.arrival_s
        turns = session.conversation.turns
        first_turn = 0
        while sent_s < at_s and first_turn < len(session.think_s):
            sent_s += turns[first_turn].output_tokens * token_s + session.think_s[first_turn]
            first_turn += 1
        if sent_s >= at_s:
            started.append(replace(session, arrival_s=sent_s - at_s, first_turn=first_turn))
    return sorted(started, key=lambda session: session.arrival_s)


def _check_arguments(
    trace: Trace, time_scale: float, num_sessions: int | None, duration_s: float | None
) -> None:
    if not trace.conversations:
        raise WorkloadError("trace", trace.name, "a trace of at least one conversation")
    check_positive("time_scale", time_scale)
    if num_sessions is not None:
        check_count("num_sessions", num_sessions)
    if duration_s is not None:
        check_positive("duration_s", duration_s)


def _arrivals(
    trace: Trace,
    rate_per_s: float | None,
    recorded: Trace | None,
    order_rng: np.random.Generator,
    arrival_rng: np.random.Generator,
) -> Iterator[tuple[float, ConversationTrace]]:
    if rate_per_s is not None:
        check_positive("rate_per_s", rate_per_s)
        if recorded is None:
            times = _poisson_times(rate_per_s, arrival_rng)
        else:
            times = _rescaled_times(recorded, rate_per_s, arrival_rng)
        return zip(times, _shuffled(trace, order_rng), strict=False)
    if recorded is not None:
        arrivals = _recorded_arrivals(recorded)
        if recorded is trace:
            return iter(arrivals)
        return zip((time_s for time_s, _ in arrivals), _shuffled(trace, order_rng), strict=False)
    raise WorkloadError("rate_per_s", rate_per_s, "given, or `recorded` instead of it")


def _poisson_times(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    time = 0.0
    while True:
        time += rng.standard_exponential()
        yield time / rate_per_s


def _rescaled_times(recorded: Trace, rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield arrivals from a recording's scaled pauses, cyclically from a random one on."""
    recorded_s = np.array([time_s for time_s, _ in _recorded_arrivals(recorded)])
    pauses_s = np.diff(recorded_s)
    if not pauses_s.sum() > 0:
        raise WorkloadError("recorded", recorded.name, "a trace whose conversations come at different times")
    scaled_s = pauses_s / pauses_s.mean() / rate_per_s
    first = int(rng.integers(len(scaled_s)))
    return itertools.accumulate(itertools.cycle(np.roll(scaled_s, -first).tolist()))


def _recorded_arrivals(trace: Trace) -> list[tuple[float, ConversationTrace]]:
    arrivals: list[tuple[float, ConversationTrace]] = []
    for conversation in trace.conversations:
        if conversation.arrival_s is None:
            field = f"arrival_s of conversation {conversation.conversation_id!r} of {trace.name!r}"
            raise WorkloadError(field, None, "recorded", "draw Poisson arrivals by `rate_per_s`")
        arrivals.append((conversation.arrival_s, conversation))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def _shuffled(trace: Trace, rng: np.random.Generator) -> Iterator[ConversationTrace]:
    """Yield all conversations in a random order, then again in other orders under new ids, without end."""
    ids = {conversation.conversation_id for conversation in trace.conversations}
    for use in itertools.count(1):
        for index in rng.permutation(len(trace.conversations)).tolist():
            conversation = trace.conversations[index]
            if use > 1:
                session_id = conversation.session_id and f"{conversation.session_id}@{use}"
                conversation_id = unused_id(f"{conversation.conversation_id}@{use}", ids, "@")
                conversation = replace(conversation, conversation_id=conversation_id, session_id=session_id)
            yield conversation
