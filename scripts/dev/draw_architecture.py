"""The rooms of this repository and who imports whom, drawn from the code.

    python scripts/dev/draw_architecture.py            # writes docs/architecture.svg
    python scripts/dev/draw_architecture.py --check    # exit status 1 if the picture there is of other code

A room is a package or a module at the top of `pensieve_jax`, or another package. A room stands above all that
it imports. An arrow is an import; those that follow from others are left out. Under a name is how the first
line of its docstring begins.
"""

from __future__ import annotations

import ast
import functools
import html
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGES = ("pensieve_jax", "model_defs", "pallas_kernels")
LAUNCHERS = "scripts"
_FACADE = "pensieve_jax"  # what `import pensieve_jax` gives is a list of what stands in its rooms
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 74, 30, 46, 16


class Room(NamedTuple):
    """A package or a top-level module: what it is for, and the rooms that it imports."""

    purpose: str
    imports: frozenset[str]


def room_of(module: str) -> str | None:
    """The room of a dotted module name; None for what is not of this repository."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    return ".".join(parts[:2]) if parts[0] == _FACADE and len(parts) > 1 else parts[0]


def imported_modules(path: Path, modules: Collection[str] = ()) -> set[str]:
    """Dotted names of what a file imports, at any place in it, but for type checkers only.

    `from a import b` is an import of `a.b` where that is one of `modules`, else of `a`.
    """
    found: set[str] = set()
    for node in _imports(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {_facade().get(name, name) for name in names}
            known = names.intersection(modules) | (names & set(_facade().values()))
            found.update(known)
            if names != known:
                found.add(node.module)
    return found


@functools.cache
def _imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, but for type checkers only."""
    nodes = list(statements(ast.parse(path.read_text(encoding="utf-8"))))
    typing_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for inner in statements(node)
    }
    return [
        node
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in typing_only
    ]


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements in a node, at any depth: far fewer than nodes, most of which are of expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from statements(inner)


def _is_type_checking(test: ast.expr) -> bool:
    """`if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


@functools.cache
def _facade() -> dict[str, str]:
    """Where a name stands that `import pensieve_jax` gives."""
    tree = ast.parse((ROOT / _FACADE / "__init__.py").read_text(encoding="utf-8"))
    return {
        f"{_FACADE}.{alias.name}": node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def read_rooms(root: Path = ROOT) -> dict[str, Room]:
    """Every room, by name."""
    rooms = {f"{_FACADE}.{path.stem}" for path in (root / _FACADE).iterdir()}
    imports: dict[str, set[str]] = {}
    purposes: dict[str, str] = {}
    for package in (*PACKAGES, LAUNCHERS):
        for path in sorted((root / package).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            name = LAUNCHERS if package == LAUNCHERS else room_of(module)
            if name is None or name == _FACADE:
                continue
            if name == module:
                purposes.setdefault(name, ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
            found = {room_of(imported) for imported in imported_modules(path, rooms)}
            imports.setdefault(name, set()).update(one for one in found if one)
    purposes[LAUNCHERS] = "Launchers: benchmarks, simulations, figures, training"
    return {
        name: Room(purposes.get(name, "").partition("\n")[0], frozenset(found & imports.keys()) - {name})
        for name, found in sorted(imports.items())
    }


def cycles(rooms: Mapping[str, Room]) -> list[str]:
    """Rooms that import each other, however far round, by name."""
    reached = {name: _reached(rooms, name) for name in rooms}
    return sorted(name for name in rooms if name in reached[name])


def levels(rooms: Mapping[str, Room]) -> dict[str, int]:
    """How many rooms stand below each, one on the other."""
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((level(one) for one in rooms[name].imports), default=-1)
        return found[name]

    for name in rooms:
        level(name)
    return found


def direct(rooms: Mapping[str, Room], name: str) -> list[str]:
    """What a room imports, less what that imports in turn."""
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
    """The picture, as SVG; the same for the same rooms."""
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
    """Where those above stand that import a room, from -1/2 to 1/2 of their rows."""
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
        print(f"{PICTURE.relative_to(ROOT)} is not of this code: run scripts/dev/draw_architecture.py")
        return EXIT_FAILED
    return 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_bool("check", False, "Write nothing; say whether the picture is of this code.")


if __name__ == "__main__":
    define_flags()
    run(main)
