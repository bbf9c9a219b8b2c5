"""Small trace files and traces for the tests of this package."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from hypothesis import strategies as st

from pensieve_lab.workload import ConversationTrace, Trace, TurnTrace


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_lines(path: Path, *objects: object) -> Path:
    return write(path, "".join(json.dumps(value) + "\n" for value in objects))


def count_words(text: str) -> int:
    return len(text.split())


def conversation(conversation_id="a", *lengths, gaps=(), thinks=(), arrival_s=None) -> ConversationTrace:
    gaps = gaps or (None,) * len(lengths)
    thinks = thinks or (None,) * len(lengths)
    turns = (
        TurnTrace(prompt, output, gap, think)
        for (prompt, output), gap, think in zip(lengths, gaps, thinks, strict=True)
    )
    return ConversationTrace(conversation_id, tuple(turns), arrival_s)


def lengths_of(trace_of: Trace) -> list[list[tuple[int, int]]]:
    """Prompt and output tokens of every turn of every conversation."""
    return [[(t.prompt_tokens, t.output_tokens) for t in c.turns] for c in trace_of.conversations]


times = st.one_of(st.integers(0, 10**6), st.floats(0, 1e9))
turns = st.builds(
    TurnTrace, st.integers(1, 10**5), st.integers(1, 10**5), st.none() | times, st.none() | times
)


@st.composite
def traces(draw: st.DrawFn, min_conversations: int = 0, arrivals: bool = False) -> Trace:
    ids = draw(st.lists(st.text(min_size=1, max_size=5), min_size=min_conversations, max_size=6, unique=True))
    return Trace(
        draw(st.text(max_size=5)),
        tuple(
            ConversationTrace(
                conversation_id,
                tuple(draw(st.lists(turns, min_size=1, max_size=5))),
                draw(times if arrivals else st.none() | times),
            )
            for conversation_id in ids
        ),
    )
