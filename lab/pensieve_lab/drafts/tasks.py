"""Prompts with the replies that a model is to give: edits of code that it has read, and text.

Owns: the made edits, and how a task's context and reply are written.
Does not know: engines, or how a reply is enforced.

A seeded generator makes an edit from a file of this checkout: in some lines a word changes, some lines leave,
and some come from another file. The reply is a perfect agent's: the whole new file, or blocks of the old and
the new lines.
"""

from __future__ import annotations

import difflib
import gzip
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_FEWEST_CHARACTERS: Final = 1500
_MOST_CHARACTERS: Final = 9000
_MOST_HUNKS: Final = 6
_LINES_AROUND: Final = 3


type Write = Callable[[Sequence[str], Sequence[str]], str]
"""Returns the reply that changes these old lines to these new ones."""


class Task(NamedTuple):
    """One turn: the ids of its prompt, and those of the reply that it is to have."""

    prompt: list[int]
    reply: list[int]


def edited(lines: Sequence[str], others: Sequence[str], choose: random.Random) -> list[str]:
    """Return the lines of a file after a few hunks of changes; `others` are lines to insert."""
    found = list(lines)
    for _ in range(choose.randint(2, _MOST_HUNKS)):
        place, num = choose.randrange(len(found)), choose.randint(1, 3)
        kind = choose.choice(("word", "word", "remove", "insert"))
        if kind == "remove" and len(found) > 20:
            del found[place : place + num]
        elif kind == "insert":
            start = choose.randrange(max(len(others) - num, 1))
            found[place:place] = others[start : start + num]
        else:
            for at in range(place, min(place + num, len(found))):
                found[at] = re.sub(r"\w+", lambda word: f"{word[0]}_new", found[at], count=1)
    return found


def whole_file(old: Sequence[str], new: Sequence[str]) -> str:
    """Return a reply that is the new file."""
    return "".join(new)


def search_and_replace(old: Sequence[str], new: Sequence[str]) -> str:
    """Return a reply that names the old lines of each hunk, and then the new ones."""
    blocks = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(_LINES_AROUND):
        before, after = old[group[0][1] : group[-1][2]], new[group[0][3] : group[-1][4]]
        parts = ("<<<<<<< SEARCH\n", *before, "=======\n", *after, ">>>>>>> REPLACE\n")
        blocks.append("".join(parts))
    return "".join(blocks)


EDITS: Final[dict[str, Write]] = {
    "edit, whole file": whole_file,
    "edit, search and replace": search_and_replace,
}


def edits(root: Path, num: int, write: Write) -> Iterator[tuple[str, str]]:
    """Yield the context and the reply of `num` edits of this checkout's files; the same for each form."""
    choose = random.Random(0)
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "pensieve_jax").rglob("*.py"))}
    paths = [path for path, text in texts.items() if _FEWEST_CHARACTERS < len(text) < _MOST_CHARACTERS]
    choose.shuffle(paths)
    for path in paths[:num]:
        old = texts[path].splitlines(keepends=True)
        others = texts[choose.choice(paths)].splitlines(keepends=True)
        new = edited(old, others, choose)
        name = path.relative_to(root)
        yield f"Change {name} as discussed.\n\n{name}\n{texts[path]}\nThe changes:\n", write(old, new)


def pages(root: Path, num: int) -> Iterator[tuple[str, str]]:
    """Yield the beginning of each of `num` pages of this checkout, and what comes next."""
    for path in sorted((root / "docs").glob("*.md"))[:num]:
        text = path.read_text(encoding="utf-8")[:_MOST_CHARACTERS]
        cut = text.find("\n\n", len(text) // 2) + 2
        yield text[:cut], text[cut:]


def chats(path: Path, num: int) -> Iterator[tuple[str, str]]:
    """Yield the context and the last reply of `num` dialogues of a file.

    Each line is a JSON object whose `turns` are pairs of a speaker and a text, in order.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            texts = [text for _, text in json.loads(line)["turns"]]
            texts = texts[: len(texts) // 2 * 2]  # the second speaker replies
            if len(texts) > 2:
                yield "\n".join(texts[:-1]) + "\n", texts[-1]
                num -= 1
            if num <= 0:
                return


def encoded(
    pairs: Iterable[tuple[str, str]], encode: Callable[[str], list[int]], *, max_prompt: int, max_reply: int
) -> list[Task]:
    """Return the tasks of contexts and replies, without those whose prompts are too long; replies are cut."""
    tasks = [Task(encode(context), encode(reply)[:max_reply]) for context, reply in pairs]
    return [task for task in tasks if len(task.prompt) <= max_prompt and task.reply]
