"""Draw the life of a turn and the life of a chunk, for docs/architecture.md.

    python scripts/dev/draw_lives.py            # writes docs/turn.svg and docs/chunk.svg
    python scripts/dev/draw_lives.py --check    # exit status 1 if a picture is out of date

The states of a chunk, their columns and every arrow between them come from `cache/states.py`; only the rows
and the words on the arrows stand here. The stages of a turn stand here, each with the file that does it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from pensieve_jax.cache.states import (
    EVICTION_CLASS_OF,
    TRANSITIONS,
    WITH_PAGE,
    WITH_SLOT,
    ChunkState,
    EvictionClass,
)
from pensieve_jax.cache.states import ChunkEvent as Event
from pensieve_jax.commands.launch import EXIT_FAILED, run

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[2]
TURN = ROOT / "docs" / "turn.svg"
CHUNK = ROOT / "docs" / "chunk.svg"
Point = tuple[float, float]

_GREY, _RED = "#6b7280", "#b3392f"
_BOX_WIDTH, _STAGE_WIDTH, _BOX_HEIGHT = 190, 222, 62


class Stage(NamedTuple):
    """A stage of a turn.

    Attributes:
      lane, row: its column, by `LANES`, and its row.
      title: what happens.
      path: the file or folder that does it.
    """

    lane: int
    row: int
    title: str
    path: str


LANES = ("Caller or front end", "Engine, on the host", "Device")
STAGES = {
    "encode": Stage(0, 0, "1 Text to tokens", "pensieve_jax/prompts.py"),
    "queue": Stage(1, 0, "2 Queue", "pensieve_jax/engine/engine.py"),
    "admit": Stage(1, 1, "3 Admit: set pages aside", "pensieve_jax/cache/manager.py"),
    "swap_in": Stage(2, 1, "Copy chunks in", "pensieve_jax/device/transfers/"),
    "grant": Stage(1, 2, "4 Grant tokens", "pensieve_jax/scheduler/scheduler.py"),
    "plan": Stage(1, 3, "5 Plan: one buffer", "pensieve_jax/scheduler/planner.py"),
    "dispatch": Stage(2, 3, "6 Dispatch", "pensieve_jax/device/model_runner.py"),
    "forward": Stage(2, 4, "7 Forward", "model_defs/"),
    "sample": Stage(2, 5, "8 Sample", "pensieve_jax/decoding/device/sampler.py"),
    "finish": Stage(1, 5, "9 Finish: ids to text", "pensieve_jax/text/reply_tokens.py"),
    "commit": Stage(1, 6, "Commit to the history", "pensieve_jax/engine/ledger.py"),
    "idle": Stage(1, 7, "Idle: pages and slots stay", "pensieve_jax/cache/evictor.py"),
    "delta": Stage(0, 5, "New text to the caller", "pensieve_jax/engine/turn.py"),
    "output": Stage(0, 6, "Output with usage", "pensieve_jax/core/outputs.py"),
}
FLOWS = (
    ("encode", "queue", "submit"),
    ("queue", "admit", ""),
    ("admit", "grant", ""),
    ("admit", "swap_in", "on host"),
    ("grant", "plan", ""),
    ("plan", "dispatch", "one copy"),
    ("dispatch", "forward", ""),
    ("forward", "sample", ""),
    ("sample", "finish", "ids"),
    ("finish", "delta", "delta"),
    ("finish", "commit", "last token"),
    ("commit", "output", ""),
    ("commit", "idle", ""),
)
# Flows that go back, in a channel beside the lane of the engine: its distance, and the words on it.
RETURNS = (
    ("finish", "grant", 16, "next token"),
    ("grant", "queue", 32, "suspended"),
    ("idle", "admit", 92, "next turn"),
)

# Rows by what happens: copies out above, both tiers between, copies in and the way to a page below.
ROW_OF = {
    ChunkState.ON_GPU: 0,
    ChunkState.COPYING_OUT: 0,
    ChunkState.LEAVING: 0,
    ChunkState.ON_BOTH: 1,
    ChunkState.RESERVED: 2,
    ChunkState.COPYING_IN: 2,
    ChunkState.ON_CPU: 2,
    ChunkState.DROPPED: 3,
}
COLUMNS = ("Device memory: a page", "Page and slot", "Host memory: a slot")
WORDS = {
    Event.RESERVE: "set aside",
    Event.FILL: "computed by a step",
    Event.CANCEL: "cancelled",
    Event.SWAP_OUT: "swap out",
    Event.SWAP_IN: "swap in",
    Event.ARRIVE: "copy complete",
    Event.LOSE: "copy lost",
    Event.GIVE_PAGE: "page taken",
    Event.GIVE_SLOT: "slot freed",
    Event.DROP: "drop",
}
FILL_OF = {
    EvictionClass.ABSENT: ("#f3f1ea", "no KV"),
    EvictionClass.DIRTY: ("#fbe3d6", "dirty: copy or drop before the page is free"),
    EvictionClass.CLEAN: ("#dff0dc", "clean: the page is free to take"),
    EvictionClass.HOST: ("#dbe8f8", "host: drop to free the slot"),
    EvictionClass.ARRIVING: ("#ece4f6", "copying: nothing to free yet"),
    EvictionClass.DEPARTING: ("#ece4f6", "copying: nothing to free yet"),
}


def _page(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG document."""
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for name, color in (("a", _GREY), ("d", _RED))
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" role="img">'
    )
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join(
        [
            head,
            f"<title>{html.escape(title)}</title>",
            background,
            f"<defs>{markers}</defs>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, style: str = 'font-size="11"') -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>'


def _box(corner: Point, size: Point, fill: str, title: str, lines: Sequence[str]) -> Iterator[str]:
    x, y = corner
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{size[0]:g}" height="{size[1]:g}" rx="6" fill="{fill}" '
        'stroke="#b9c0ca"/>'
    )
    yield _text(x + 9, y + 20, title, 'font-size="13" font-weight="bold"')
    for number, line in enumerate(lines):
        yield _text(x + 9, y + 37 + 14 * number, line)


def _arrow(points: Sequence[Point], *, color: str = _GREY, marker: str = "a") -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.3" marker-end="url(#{marker})"/>'


def _label(x: float, y: float, words: str, anchor: str = "middle", color: str = "#374151") -> str:
    style = f'font-size="11" fill="{color}" text-anchor="{anchor}"'
    halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'
    return _text(x, y, words, f"{style} {halo}")


def draw_turn() -> str:
    """Return the life of a turn as SVG."""
    lane_width, row_height, margin, top = 330, 96, 20, 44
    width = margin * 2 + lane_width * (len(LANES) - 1) + _STAGE_WIDTH
    height = top + row_height * 8 - 10

    def corner(stage: Stage) -> Point:
        return margin + stage.lane * lane_width, top + stage.row * row_height

    parts = []
    for number, lane in enumerate(LANES):
        parts.append(
            _text(margin + number * lane_width, 26, lane, 'font-size="14" font-weight="bold" fill="#374151"')
        )
    for source, target, words in FLOWS:
        (x, y), (to_x, to_y) = corner(STAGES[source]), corner(STAGES[target])
        if x == to_x:
            parts.append(_arrow([(x + _STAGE_WIDTH / 2, y + _BOX_HEIGHT), (x + _STAGE_WIDTH / 2, to_y)]))
            parts.append(_label(x + _STAGE_WIDTH / 2 + 8, (y + _BOX_HEIGHT + to_y) / 2 + 4, words, "start"))
        else:
            begin, end = (x + _STAGE_WIDTH, to_x) if x < to_x else (x, to_x + _STAGE_WIDTH)
            parts.append(_arrow([(begin, y + _BOX_HEIGHT / 2), (end, y + _BOX_HEIGHT / 2)]))
            parts.append(_label(begin + (30 if x < to_x else -30), y + _BOX_HEIGHT / 2 - 7, words))
    for source, target, distance, words in RETURNS:
        (x, y), (_, to_y) = corner(STAGES[source]), corner(STAGES[target])
        # One box gives and takes several of these flows: each has a height of its own.
        y, to_y = y + 14, to_y + _BOX_HEIGHT - 14
        parts.append(_arrow([(x, y), (x - distance, y), (x - distance, to_y), (x, to_y)]))
        parts.append(_label(x - distance - 5, (y + to_y) / 2, words, "end"))
    for stage in STAGES.values():
        fill = ("#f3f1ea", "#eef4fb", "#dff0dc")[stage.lane]
        lines = [stage.path.removeprefix("pensieve_jax/")]
        parts += _box(corner(stage), (_STAGE_WIDTH, _BOX_HEIGHT), fill, stage.title, lines)
    return _page(width, height, "The life of a turn, from text to text", parts)


def column_of(state: ChunkState) -> int:
    """Return the column of a state: a page alone, both, or a slot alone."""
    return int(state in WITH_SLOT) + int(state in WITH_SLOT and state not in WITH_PAGE)


def draw_chunk() -> str:
    """Return the life of a chunk as SVG: its states, and every transition between them."""
    column_width, row_height, margin, top = 330, 130, 24, 56
    width = margin * 2 + column_width * 2 + _BOX_WIDTH + 60
    bottom = top + 3 * row_height
    height = bottom + _BOX_HEIGHT + 56

    def corner(state: ChunkState) -> Point:
        return margin + column_of(state) * column_width, top + ROW_OF[state] * row_height

    parts = []
    for number, title in enumerate(COLUMNS):
        parts.append(
            _text(
                margin + number * column_width, 28, title, 'font-size="14" font-weight="bold" fill="#374151"'
            )
        )
    events: dict[tuple[ChunkState, ChunkState], list[Event]] = {}
    for (state, event), target in TRANSITIONS.items():
        events.setdefault((state, target), []).append(event)
    for (state, target), found in events.items():
        words = " or ".join(WORDS[event] for event in found)
        parts += _transition(state, target, words, corner(state), corner(target))
    for state in ChunkState:
        fill, _ = FILL_OF[EVICTION_CLASS_OF[state]]
        if state is ChunkState.DROPPED:
            size = (column_width * 2 + _BOX_WIDTH, _BOX_HEIGHT)
            lines = ["in neither tier; the next turn recomputes the chunk from its raw tokens"]
        else:
            size = (_BOX_WIDTH, _BOX_HEIGHT)
            lines = [_places(state)]
        parts += _box(corner(state), size, fill, state.value, lines)
    legend = dict.fromkeys(FILL_OF.values())
    x = float(margin)
    for fill, words in legend:
        y = height - 34
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{fill}" stroke="#b9c0ca"/>')
        parts.append(_text(x + 17, y + 10, words))
        x += 32 + 5.4 * len(words)
    return _page(width, height, "The states of a chunk and the transitions between them", parts)


def _places(state: ChunkState) -> str:
    """Return what a state says of page and slot."""
    if state is ChunkState.RESERVED:
        return "page set aside, no KV yet"
    page = (
        ("page being written" if state is ChunkState.COPYING_IN else "page valid")
        if state in WITH_PAGE
        else ""
    )
    is_written = state in (ChunkState.COPYING_OUT, ChunkState.LEAVING)
    slot = ("slot being written" if is_written else "slot valid") if state in WITH_SLOT else ""
    return ", ".join(filter(None, (page, slot)))


def _transition(state: ChunkState, target: ChunkState, words: str, corner: Point, to: Point) -> Iterator[str]:
    """Yield the arrow of a transition and its words; drops are short red arrows."""
    (x, y), (to_x, to_y) = corner, to
    middle, half = _BOX_WIDTH / 2, _BOX_HEIGHT / 2
    if target is ChunkState.DROPPED:
        # Only the lowest row reaches the box at the bottom; others show that they can be dropped.
        drop_x, begin_y = x + _BOX_WIDTH - 22, y + _BOX_HEIGHT
        end_y = to_y if ROW_OF[state] == 2 else begin_y + 26
        yield _arrow([(drop_x, begin_y), (drop_x, end_y)], color=_RED, marker="d")
        yield _label(drop_x + 6, begin_y + 18, words, "start", _RED)
    elif state is ChunkState.DROPPED:
        yield _arrow([(to_x + 30, y), (to_x + 30, to_y + _BOX_HEIGHT)])
        yield _label(to_x + 36, (y + to_y + _BOX_HEIGHT) / 2 + 4, words, "start")
    elif column_of(state) == column_of(target):
        shift = -40 if abs(ROW_OF[state] - ROW_OF[target]) == 1 else -50
        is_down = to_y > y
        begin_y, end_y = (y + _BOX_HEIGHT, to_y) if is_down else (y, to_y + _BOX_HEIGHT)
        yield _arrow([(x + middle + shift, begin_y), (x + middle + shift, end_y)])
        # Below the middle, which arrows from both tiers cross.
        height = max(begin_y, end_y) - abs(begin_y - end_y) / 4
        yield _label(x + middle + shift + 6, height, words, "start")
    elif ROW_OF[state] == ROW_OF[target]:
        is_right = to_x > x
        height = y + half + (-14 if is_right == (ROW_OF[state] == 0) else 14)
        begin_x, end_x = (x + _BOX_WIDTH, to_x) if is_right else (x, to_x + _BOX_WIDTH)
        yield _arrow([(begin_x, height), (end_x, height)])
        yield _label((begin_x + end_x) / 2, height - 5 if height < y + half else height + 14, words)
    else:  # from both tiers to one
        is_right = to_x > x
        begin = (x + (_BOX_WIDTH if is_right else 0), y + half)
        end = (to_x + (30 if is_right else _BOX_WIDTH - 60), to_y if to_y > y else to_y + _BOX_HEIGHT)
        yield _arrow([begin, (end[0], begin[1]), end])
        yield _label((begin[0] + end[0]) / 2, begin[1] - 6, words)


def main() -> int:
    """Write or compare both pictures."""
    status = 0
    for path, picture in ((TURN, draw_turn()), (CHUNK, draw_chunk())):
        if not FLAGS.check:
            path.write_text(picture, encoding="utf-8")
            print(path.relative_to(ROOT))
        elif not path.is_file() or path.read_text(encoding="utf-8") != picture:
            print(f"{path.relative_to(ROOT)} is out of date: run scripts/dev/draw_lives.py")
            status = EXIT_FAILED
    return status


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_bool("check", False, "Write nothing; fail if a picture is out of date.")


if __name__ == "__main__":
    define_flags()
    run(main)
