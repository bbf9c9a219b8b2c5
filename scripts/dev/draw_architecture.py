"""Draw the rooms of this repository and their imports, from the code.

    python scripts/dev/draw_architecture.py            # writes docs/architecture.svg
    python scripts/dev/draw_architecture.py --check    # exit status 1 if the picture is out of date

A room is a top-level package or module of `pensieve_jax`, `pensieve_jax` itself with its public names, or
another package. Rooms stand above the rooms that they import. Arrows are imports; those implied by other
arrows are omitted. Below a name stands the beginning of its docstring.
"""

from __future__ import annotations

import ast
import html
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import grimp
from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGES = ("pensieve_jax", "model_defs", "pallas_kernels")
LABORATORY = "pensieve_lab"
_FACADE = "pensieve_jax"
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 74, 30, 46, 16


class Room(NamedTuple):
    """Package or top-level module: its purpose, and the rooms that it imports."""

    purpose: str
    imports: frozenset[str]


def room_of(module: str) -> str:
    """Return the room of a dotted module name."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == _FACADE else 1])


def read_imports() -> grimp.ImportGraph:
    """Return all imports in the packages and the laboratory, except those for type checkers only."""
    graph = grimp.build_graph(*PACKAGES, LABORATORY, exclude_type_checking_imports=True, cache_dir=None)
    # `pensieve_jax` imports most of its public names on first use. grimp sees these imports only in the block
    # for type checkers.
    names = grimp.build_graph(_FACADE, cache_dir=None).find_modules_directly_imported_by(_FACADE)
    for name in names:
        graph.add_import(importer=_FACADE, imported=name)
    return graph


def read_rooms() -> dict[str, Room]:
    """Return every room, by name."""
    graph = read_imports()
    imports: dict[str, set[str]] = {room_of(module): set() for module in graph.modules}
    for module in graph.modules:
        found = graph.find_modules_directly_imported_by(module)
        imports[room_of(module)].update(room_of(imported) for imported in found)
    return {name: Room(_purpose(name), frozenset(found - {name})) for name, found in sorted(imports.items())}


def _purpose(room: str) -> str:
    """Return the first line of a room's docstring."""
    path = (ROOT / "lab" if room == LABORATORY else ROOT).joinpath(*room.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def cycles(rooms: Mapping[str, Room]) -> list[str]:
    """Return the names of rooms in import cycles."""
    reached = {name: _reached(rooms, name) for name in rooms}
    return sorted(name for name in rooms if name in reached[name])


def levels(rooms: Mapping[str, Room]) -> dict[str, int]:
    """Return the level of each room: the longest path of imports below it."""
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((level(one) for one in rooms[name].imports), default=-1)
        return found[name]

    for name in rooms:
        level(name)
    return found


def direct(rooms: Mapping[str, Room], name: str) -> list[str]:
    """Return the imports of a room, without those that its other imports reach."""
    beyond = {far for one in rooms[name].imports for far in _reached(rooms, one)}
    return sorted(rooms[name].imports - beyond)


def _reached(rooms: Mapping[str, Room], name: str) -> set[str]:
    found: set[str] = set()
    left = set(rooms[name].imports)
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left |= rooms[one].imports
    return found


def draw(rooms: Mapping[str, Room]) -> str:
    """Return the picture as SVG. It depends only on the rooms."""
    level_of = levels(rooms)
    rows: list[list[str]] = []
    for level in range(max(level_of.values()), -1, -1):
        row = [name for name in rooms if level_of[name] == level]
        rows.append(sorted(row, key=lambda name: (_middle_of_importers(rooms, rows, name), name)))
    widest = max(map(len, rows))
    width = 2 * _MARGIN + widest * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + len(rows) * (_HEIGHT + _GAP_Y) - _GAP_Y
    places = {
        name: (
            (width - len(row) * (_WIDTH + _GAP_X) + _GAP_X) // 2 + i * (_WIDTH + _GAP_X),
            _MARGIN + number * (_HEIGHT + _GAP_Y),
        )
        for number, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#8a8f98"/></marker></defs>',
    ]
    for name in rooms:
        parts += (_arrow(places[name], places[target]) for target in direct(rooms, name))
    for name, room in rooms.items():
        parts += _box(name, room.purpose, places[name])
    return "\n".join([*parts, "</svg>", ""])


def _middle_of_importers(rooms: Mapping[str, Room], rows: Sequence[Sequence[str]], name: str) -> float:
    """Return the average position of a room's importers, from -1/2 to 1/2 of their rows."""
    places = [
        (row.index(one) + 0.5) / len(row) - 0.5 for row in rows for one in row if name in direct(rooms, one)
    ]
    return sum(places) / len(places) if places else 0.0


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    x, y = source[0] + _WIDTH // 2, source[1] + _HEIGHT
    to_x, to_y = target[0] + _WIDTH // 2, target[1]
    bend = min(60, (to_y - y) // 2)
    return (
        f'<path d="M{x} {y}C{x} {y + bend} {to_x} {to_y - bend} {to_x} {to_y}" fill="none" '
        'stroke="#8a8f98" marker-end="url(#a)"/>'
    )


def _box(name: str, purpose: str, place: tuple[int, int]) -> Iterable[str]:
    x, y = place
    fill = "#eef4fb" if name.startswith(_FACADE) else "#f3f1ea"
    yield f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{fill}" stroke="#b9c0ca"/>'
    title = name.removeprefix(f"{_FACADE}.")
    yield f'<text x="{x + 9}" y="{y + 19}" font-size="13" font-weight="bold">{html.escape(title)}</text>'
    lines = textwrap.wrap(purpose, 27)
    if len(lines) > 3:
        lines = [*lines[:2], f"{lines[2][:25]}…"]
    for number, line in enumerate(lines):
        yield f'<text x="{x + 9}" y="{y + 36 + 14 * number}" font-size="11">{html.escape(line)}</text>'


def main() -> int:
    rooms = read_rooms()
    if turning := cycles(rooms):
        print(f"rooms that import each other: {', '.join(turning)}")
        return EXIT_FAILED
    picture = draw(rooms)
    if not FLAGS.check:
        PICTURE.write_text(picture, encoding="utf-8")
        print(f"{PICTURE.relative_to(ROOT)}: {len(rooms)} rooms")
        return 0
    if not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != picture:
        print(f"{PICTURE.relative_to(ROOT)} is out of date: run scripts/dev/draw_architecture.py")
        return EXIT_FAILED
    return 0


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_bool("check", False, "Write nothing; fail if the picture is out of date.")


if __name__ == "__main__":
    define_flags()
    run(main)
