"""The mutants of a run, drawn at random from packages of the product.

Owns: which mutants a seed draws.
Does not know: what tests there are.
Called by `programs.run_mutants`.

Each room (a package of the product) gives equally many mutants. Within a room each line that can be changed
is equally likely, so a large file gives more than a small one. A line with many numbers gives no more than a
line with one comparison: a second mutant of a line comes only after every other line gave one. A smaller draw
is a prefix of a larger one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from pensieve_lab.mutation.candidates import find_candidates, make_mutant
from pensieve_lab.mutation.mutants import Candidate, Mutant
from pensieve_lab.mutation.rooms import room_folder


def draw(root: Path, rooms: Sequence[str], num: int, seed: int) -> list[Mutant]:
    """Return `num` mutants, or all if there are fewer, with the rooms alternating."""
    sources = {room: _draw_room(root, room, seed) for room in rooms}
    drawn: list[Mutant] = []
    while sources and len(drawn) < num:
        for room in list(sources):
            mutant = next(sources[room], None)
            if mutant is None:
                del sources[room]
            elif len(drawn) < num:
                drawn.append(mutant)
    return drawn


def _draw_room(root: Path, room: str, seed: int) -> Iterator[Mutant]:
    texts = {
        str(path.relative_to(root)): path.read_text("utf-8")
        for path in sorted(room_folder(root, room).rglob("*.py"))
    }
    rng = random.Random(f"{seed} {room}")
    order = _by_rounds([find_candidates(*item) for item in texts.items()], rng)
    return (m for candidate in order if (m := make_mutant(candidate, texts[candidate.file])) is not None)


def _by_rounds(files: list[list[Candidate]], rng: random.Random) -> Iterator[Candidate]:
    """Yield one candidate of each line, lines in random order, then second ones."""
    lines = [
        list(group)
        for candidates in files
        for _, group in itertools.groupby(candidates, key=lambda candidate: candidate.line)
    ]
    for candidates in lines:
        rng.shuffle(candidates)
    while lines:
        rng.shuffle(lines)
        for candidates in lines:
            yield candidates.pop()
        lines = [candidates for candidates in lines if candidates]
