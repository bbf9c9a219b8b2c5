"""Turns with schemas on an engine whose cache is far too small for them, and what became of each.

Owns: the engine's sizes, the rounds of new conversations, returning ones and forks, restarts, and the counts.
Does not know: which schemas are drawn, or how a reply is judged.

A round is one batch: new conversations, a second turn of each conversation of the round before, and a fork of
each of these with a schema of another. Every few rounds the engine is closed and opened again on the same
history, so that conversations return to an empty cache.
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    Usage,
)
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.sampling_params import MAX_BIASED_IDS
from pensieve_jax.stream import Stream
from pensieve_jax.text import Tokenizer
from pensieve_lab.schema_check.bench import Case
from pensieve_lab.schema_check.validation import LEAP_SECOND, problem_of

PAGES: Final = (224, 128)
"""Pages of device memory and of host memory; the turns of a round need several times as many."""
_CONTEXT_TOKENS: Final = 1024
_ROUNDS_PER_ENGINE: Final = 3
_BATCH: Final = 48
_STEP_TOKENS: Final = 192
_CLOSING: Final = frozenset('"]}')
_WHITE_SPACE_BIAS: Final = -20.0
_FREQUENCY_PENALTY: Final = 0.2  # ends repetitions of a weak model
_EVENTS: Final = ("num_suspensions", "num_dropped_chunks", "num_swapped_out_chunks", "num_swapped_in_chunks")
# What happened to a reply's turn; of each, some replies must end by themselves and be checked.
_CIRCUMSTANCES: Final[dict[str, Callable[[Usage], int]]] = {
    "suspended": lambda usage: usage.num_suspensions,
    "resumed by recomputing": lambda usage: usage.resume_recomputed_tokens,
    "resumed from host memory": lambda usage: usage.resume_swapped_in_tokens,
    "history from host memory": lambda usage: usage.swapped_in_tokens,
    "history recomputed": lambda usage: usage.recomputed_tokens,
}
_FORKED, _RETURNED, _RESTARTED = "fork", "second turn", "after a restart"


class Asked(NamedTuple):
    """A turn to run.

    Attributes:
      case: the schema of its reply.
      conversation_id: its conversation.
      kind: "first turn", "second turn" or "fork".
    """

    case: Case
    conversation_id: str
    kind: str


class Counts:
    """The replies of one model so far.

    Attributes:
      replies: number of replies by outcome: "valid", "cut" by the token limit, "invalid", a known difference,
        or why the turn failed.
      ended: number of checked replies by what had happened to their turns; those of `LEAP_SECOND` count.
      events: suspensions, dropped chunks, copies in each direction, forks and restarts.
      outcomes: for each schema, "outcome tokens" of its replies in order.
      problems: the invalid replies.
      failures: the errors of turns that failed.
    """

    def __init__(self) -> None:
        self.replies: collections.Counter[str] = collections.Counter()
        self.ended: collections.Counter[str] = collections.Counter(
            dict.fromkeys((*_CIRCUMSTANCES, _FORKED, _RETURNED, _RESTARTED), 0)
        )
        self.events: collections.Counter[str] = collections.Counter(
            dict.fromkeys((*_EVENTS, "num_forks", "num_restarts"), 0)
        )
        self.outcomes: dict[str, list[str]] = {}
        self.problems: list[dict[str, str]] = []
        self.failures: list[dict[str, str]] = []

    def take(self, asked: Asked, stream: Stream, *, is_restarted: bool) -> bool:
        """Wait for a turn and count its reply; return whether the turn succeeded."""
        case = asked.case
        try:
            for _ in stream:
                pass
        except PensieveError as error:
            self._add(case, f"failed: {type(error).__name__}", 0)
            self.failures.append({"schema": case.name, "error": str(error)[:500]})
            return False
        output = stream.output
        assert output is not None
        num_tokens = output.usage.output_tokens
        if output.finish_reason != "stop":
            self._add(case, "cut", num_tokens)
            return True
        problem = problem_of(case.schema, output.text)
        outcome = "valid" if problem is None else problem if problem == LEAP_SECOND else "invalid"
        self._add(case, outcome, num_tokens)
        if outcome == "invalid":
            assert problem is not None
            self.problems.append({"schema": case.name, "problem": problem, "reply": output.text[:500]})
        happened = [name for name, number in _CIRCUMSTANCES.items() if number(output.usage)]
        if asked.kind in self.ended:
            happened.append(asked.kind)
            happened += [_RESTARTED] if is_restarted else []
        self.ended.update(happened)
        return True

    def _add(self, case: Case, outcome: str, num_tokens: int) -> None:
        self.replies[outcome] += 1
        self.outcomes.setdefault(case.name, []).append(f"{outcome} {num_tokens}")

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for a document."""
        return {
            "num_schemas": len(self.outcomes),
            "replies": dict(sorted(self.replies.items())),
            "ended": dict(self.ended),
            "events": dict(self.events),
            "problems": self.problems,
            "failures": self.failures,
            "outcomes": self.outcomes,
        }


class Rounds:
    """Runs the turns of some schemas on one model.

    Attributes:
      counts: what became of the replies.
    """

    def __init__(self, model: str, *, size: int, max_tokens: int, seed: int, biases: Sequence[float]) -> None:
        """Prepare rounds.

        Args:
          model: the model's name, as in `LLM`.
          size: new conversations of a round.
          max_tokens: token limit of a reply.
          seed: seed of the replies.
          biases: biases towards the tokens that close a text, list or object. The turns of a schema take
            them in turn, so that it gets short replies and long ones.
        """
        self.counts = Counts()
        self._model, self._size, self._max_tokens = model, size, max_tokens
        self._seed, self._biases = seed, biases
        self._num_turns = 0
        self._logit_biases: list[dict[int, float]] = []

    def run(self, cases: Sequence[Case], programs_dir: str) -> None:
        """Run all turns, on engines with one history; compiled steps are stored in `programs_dir`."""
        with tempfile.TemporaryDirectory() as folder:
            history = f"{folder}/turns.sqlite"
            llm = opened(self._model, history, programs_dir)
            try:
                known: list[tuple[str, Case]] = []
                is_restarted = False
                for start in range(0, len(cases), self._size):
                    number = start // self._size
                    if number and number % _ROUNDS_PER_ENGINE == 0:
                        self._close(llm)
                        llm = opened(self._model, history, programs_dir)
                        is_restarted = True
                        self.counts.events["num_restarts"] += 1
                    new = [
                        Asked(case, f"{number}-{i}", "first turn")
                        for i, case in enumerate(cases[start : start + self._size])
                    ]
                    known = self._round(llm, new, known, is_restarted=is_restarted)
                    is_restarted = False
                self._round(llm, [], known, is_restarted=False)
            finally:
                self._close(llm)

    def _round(
        self, llm: LLM, new: list[Asked], known: list[tuple[str, Case]], *, is_restarted: bool
    ) -> list[tuple[str, Case]]:
        """Run one round; return the new conversations that have a turn."""
        asked = list(new)
        for (name, case), (_, other) in zip(known, known[::-1], strict=True):
            llm.fork(name, f"{name}-fork")
            self.counts.events["num_forks"] += 1
            asked += [Asked(case, name, _RETURNED), Asked(other, f"{name}-fork", _FORKED)]
        streams = [
            llm.stream(
                f"Write an example of {one.case.name}.",
                self._params(llm, one.case),
                conversation_id=one.conversation_id,
            )
            for one in asked
        ]
        succeeded = [
            self.counts.take(one, stream, is_restarted=is_restarted)
            for one, stream in zip(asked, streams, strict=True)
        ]
        return [(one.conversation_id, one.case) for one, ok in zip(new, succeeded, strict=False) if ok]

    def _params(self, llm: LLM, case: Case) -> SamplingParams:
        self._num_turns += 1
        if not self._logit_biases:
            assert llm.tokenizer is not None
            self._logit_biases = [ending_bias(llm.tokenizer, bias) for bias in self._biases]
        return SamplingParams(
            structured=case.form,
            temperature=1.0,
            seed=self._seed * 1_000_003 + self._num_turns,
            max_tokens=self._max_tokens,
            logit_bias=self._logit_biases[self._num_turns % len(self._logit_biases)],
            frequency_penalty=_FREQUENCY_PENALTY,
        )

    def _close(self, llm: LLM) -> None:
        stats = llm.stats()
        for name in _EVENTS:
            self.counts.events[name] += int(stats[name])
        llm.close()


def ending_bias(tokenizer: Tokenizer, bias: float) -> dict[int, float]:
    """Return a bias towards tokens of quotes and closing brackets alone, and against white space alone."""
    found: dict[int, float] = {}
    for token_id in range(tokenizer.vocab_size):
        text = (tokenizer.bytes_of(token_id) or b"").decode(errors="replace")
        if text and _CLOSING.issuperset(text):
            found[token_id] = bias
        elif text.isspace():
            found[token_id] = _WHITE_SPACE_BIAS
        if len(found) == MAX_BIASED_IDS:
            break
    return found


def opened(model: str, history: str | None, programs_dir: str) -> LLM:
    """Open the model with a cache that is too small for a round."""
    gpu_pages, cpu_pages = PAGES
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=gpu_pages, cpu_pages=cpu_pages, chunk_tokens=16),
        scheduler=SchedulerConfig(
            max_num_running=_BATCH,
            max_num_batched_tokens=_STEP_TOKENS,
            max_context_tokens=_CONTEXT_TOKENS,
            token_buckets=(_BATCH // 3, _BATCH, _STEP_TOKENS),
        ),
        runner=RunnerConfig(compilation_cache_dir=programs_dir),
    )
    return LLM(model, dtype="float32", history=history, config=config, progress=False)
