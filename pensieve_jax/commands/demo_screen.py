"""Output of the demonstration: one screen of 80 by 24 characters, and optionally every turn.

Owns: the texts, the picture of the KV cache, and the tables.
Does not know: how turns are served or replayed.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pensieve_jax import Output, SamplingParams
from pensieve_jax.commands.demo_conversations import CONVERSATIONS
from pensieve_jax.commands.demo_speed import NUM_USERS, Speed
from pensieve_jax.commands.launch import one_line
from pensieve_jax.commands.report import table
from pensieve_jax.commands.words import duration

COLUMNS: Final = 80
_PLACES: Final = {"gpu": ("█", "#", "in device memory"), "cpu": ("▒", "+", "in host memory")}
_DROPPED: Final = ("·", ".", "dropped")
_SECONDS: Final = "Wall time on this machine. A larger model or a longer history gains more."
_BUSY: Final = 0.5
"""Other processes' load for each processor from which the seconds say little."""
_USAGE: Final = {
    "reused": "reused_gpu_tokens",
    "swapped in": "swapped_in_tokens",
    "recomputed": "recomputed_tokens",
    "prefilled": "prefilled_tokens",
}


class DemoTurn(NamedTuple):
    """Served turn, with the data to replay it.

    Attributes:
      tiers: tier of each chunk of its history before the turn: "gpu", "cpu", or None if dropped.
    """

    conversation_id: str
    turn: int
    prompt: str
    history_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output: Output
    tiers: tuple[str | None, ...] = ()


def num_computed(turns: Sequence[DemoTurn]) -> int:
    """Return the computed tokens of histories and prompts, recomputed ones included."""
    usages = [turn.output.usage for turn in turns]
    return sum(u.prefilled_tokens + u.recomputed_tokens + u.resume_recomputed_tokens for u in usages)


def num_from_scratch(turns: Sequence[DemoTurn]) -> int:
    """Return the tokens of histories and prompts: what an engine without a KV cache computes."""
    return sum(len(turn.history_ids) + len(turn.prompt_ids) for turn in turns)


def introduction(num_chunks: int, num_filled: int) -> str:
    """Describe the demonstration: conversations of `num_filled` chunks in memory for `num_chunks`."""
    text = (
        f"{len(CONVERSATIONS)} people tell a fact and ask for it five turns later. Memory holds "
        f"{num_chunks} of the {num_filled} chunks of 32 tokens that they fill: state is copied to host "
        "memory, or dropped and recomputed. All share the first chunk. No reply may change by it."
    )
    return textwrap.fill(text, COLUMNS)


def picture(turns: Sequence[DemoTurn]) -> str:
    """Draw where each conversation's KV cache was before its last turn, with the last reply."""
    rows = []
    for name, script in CONVERSATIONS.items():
        last = [turn for turn in turns if turn.conversation_id == name][-1:]
        rows += [(name, "".join(map(_mark, turn.tiers)), script.fact, turn.output.text) for turn in last]
    width = max((len(row[1]) for row in rows), default=0)
    width, fact_width = max(width, len("state")), max(len(script.fact) for script in CONVERSATIONS.values())
    places = [(_mark(tier), place[2]) for tier, place in _PLACES.items()] + [(_mark(None), _DROPPED[2])]
    lines = ["state before the last turn: " + "  ".join(f"{mark} {what}" for mark, what in places)]
    lines.append(f"{'':6}{'state':{width}}  {'told first':{fact_width}}  last reply")
    for name, marks, fact, text in rows:
        start = f"{name:6}{marks:{width}}  {fact:{fact_width}}  "
        lines.append(start + one_line(text, COLUMNS - len(start)))
    return "\n".join(lines)


def savings(
    turns: Sequence[DemoTurn], kept: Speed, scratch: Speed, *, load: float = 0.0, num_processors: int = 1
) -> str:
    """Compare an engine that keeps KV cache with one that computes every turn from scratch.

    Args:
      turns: the turns with little memory.
      kept: speed of the engine that keeps KV cache.
      scratch: speed of the other one.
      load: load average from before the demonstration, when it had no part in it.
      num_processors: number of CPUs.
    """
    computed, all_tokens = num_computed(turns), num_from_scratch(turns)
    sooner, faster = scratch.first_token_s / kept.first_token_s, kept.tokens_per_s / scratch.tokens_per_s
    rows = [
        ("", "from scratch", "keeping state", ""),
        (
            f"first token, behind {kept.history_tokens:,} tokens",
            duration(scratch.first_token_s),
            duration(kept.first_token_s),
            f"{sooner:.1f} times sooner",
        ),
        (
            f"tokens/s of {NUM_USERS} such users",
            f"{scratch.tokens_per_s:.0f}",
            f"{kept.tokens_per_s:.0f}",
            f"{faster:.1f} times as many",
        ),
        (
            "tokens computed, as above",
            f"{all_tokens:,}",
            f"{computed:,}",
            f"{computed / all_tokens:.0%}",
        ),
    ]
    lines = [f"{what:33}{left:>13}{right:>14}  {gain}".rstrip() for what, left, right, gain in rows]
    is_busy = load >= _BUSY * num_processors
    busy = f"Wall time beside a load of {load:.1f} on {num_processors} CPUs: compare tokens."
    return "\n".join([*lines, busy if is_busy else _SECONDS])


def transcript(turns: Sequence[DemoTurn]) -> str:
    """Format all messages of all conversations, with the place of the KV cache before each turn."""
    lines = []
    for name in CONVERSATIONS:
        for turn in turns:
            if turn.conversation_id == name:
                lines.append(f"{name:>9}> {turn.prompt}")
                if turn.history_ids:
                    lines.append(f"           ({whereabouts(turn)})")
                lines.append(f"assistant> {one_line(turn.output.text, 200)}")
        lines.append("")
    return "\n".join(lines)


def num_recalled(turns: Sequence[DemoTurn]) -> int:
    """Return how many last replies contain the fact of the first turn."""
    return sum(
        turn.turn == len(CONVERSATIONS[turn.conversation_id].messages)
        and CONVERSATIONS[turn.conversation_id].fact in turn.output.text
        for turn in turns
    )


def whereabouts(turn: DemoTurn) -> str:
    """Describe where the KV cache of a turn's history was. Its last token has none before the turn."""
    usage = turn.output.usage
    parts = {
        "on the device": usage.reused_gpu_tokens,
        "swapped in": usage.swapped_in_tokens,
        "recomputed": usage.recomputed_tokens,
    }
    found = ", ".join(f"{number} {where}" for where, number in parts.items() if number)
    return f"{len(turn.history_ids)} tokens of history: {found}"


def usage_table(turns: Sequence[DemoTurn], equal: Sequence[bool]) -> str:
    """Format the sources of every turn's tokens, and whether its output equals the dense reference's."""
    columns = ["conversation", "turn", "history", "prompt", *_USAGE, "output", "suspensions", "equal"]
    rows = []
    for turn, is_equal in zip(turns, equal, strict=True):
        usage = turn.output.usage
        sources = [getattr(usage, name) for name in _USAGE.values()]
        row = [turn.conversation_id, turn.turn, len(turn.history_ids), usage.prompt_tokens, *sources]
        rows.append([*row, usage.output_tokens, usage.num_suspensions, "yes" if is_equal else "NO"])
    return table(columns, rows)


def movements(stats: Mapping[str, int | float]) -> str:
    """Describe the swapped and dropped chunks in a few lines."""
    lines = [
        f"Swapped {way}: {stats[chunks]} chunks, {stats[f'swapped_{way}_bytes'] / 1e6:.2f} MB in "
        f"{stats[f'num_swap_{way}_copies']} copies."
        for way, chunks in (("out", "num_swapped_out_chunks"), ("in", "num_swapped_in_chunks"))
    ]
    lines.append(
        f"Dropped: {stats['num_dropped_chunks']} chunks. Suspended: {stats['num_suspensions']} times. "
        f"History found on the device: {stats['gpu_hit_rate']:.0%}, in host memory: "
        f"{stats['cpu_hit_rate']:.0%}."
    )
    return "\n".join(lines)


def _mark(tier: str | None) -> str:
    """Return the character of a chunk in the picture; ASCII if the terminal cannot show blocks."""
    block, plain, _ = _DROPPED if tier is None else _PLACES[tier]
    try:
        block.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return plain
    return block
