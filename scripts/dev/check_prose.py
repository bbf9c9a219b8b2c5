"""Check comments, docstrings, Markdown and commit subjects against the rules for prose.

    python scripts/dev/check_prose.py                      # all tracked files
    python scripts/dev/check_prose.py --paths=tests,docs   # some files or folders
    python scripts/dev/check_prose.py --since=HEAD~3       # lines and subjects that were added since

CONTRIBUTING.md gives the rules. A finding is a place to read again; the exit status is 1 if there is one.
Sentences without a verb are shown as hints and do not count. `make lint` checks the lines that the last
commit, and uncommitted changes, add.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[2]
MAX_WORDS = 35
MAX_NUMBERS = 3  # of a sentence on a page, but for the log of experiments
MAX_SUBJECT = 72
MIN_DOCSTRING = 4  # words
SHORT_DOCSTRING = f"docstring of fewer than {MIN_DOCSTRING} words"
NO_VERB = "sentence without a verb"
_LOG = "lab/log/"
HINTS = frozenset({NO_VERB})
_PATTERNS = {
    "person": re.compile(r"\b(?:nobody|somebody|everybody|anybody|whoever|whomever|whom)\b", re.I),
    "of which": re.compile(r"\bof (?:which|whom|whose)\b", re.I),
    "so many": re.compile(r"\bso (?:many|much|few)\b(?! (?:that|as)\b)", re.I),
    "is no, are none": re.compile(r"\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more|less)\b)", re.I),
    "old phrase": re.compile(
        r"\b(?:by turns|at an end|as good as once|makes good|hitherto|therein|thereof)\b", re.I
    ),
}
_VERB = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|do|does|did|can|could|may|might|must|shall|should|will|would|"
    r"\w+ed|\w+ing|\w+i[sz]es?|\w+if(?:y|ies)|[a-z]{3,}s|add|allow|apply|ask|begin|build|call|cancel|check|"
    r"choose|clear|close|come|compute|copy|count|create|decode|drop|drain|draw|encode|end|fill|find|forget|free|"
    r"get|give|go|hold|join|keep|know|launch|leave|let|list|load|look|make|map|mark|measure|move|need|open|pack|"
    r"parse|pay|plan|print|put|raise|read|refuse|release|remove|render|reset|resume|return|run|said|sample|save|"
    r"say|see|send|sent|set|show|split|start|stop|submit|take|tell|told|took|truncate|undo|update|use|wait|want|"
    r"write)\b",
    re.I,
)
_NUMBER = re.compile(r"(?<![\w.#/-])\d[\d,]*(?:\.\d+)?(?![\w/-])")
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")
_END = re.compile(r"[.!?:;](?=\s+(?:[-*] +)?[A-Z`\"*(]|\s*$)")  # the next sentence may be an item of a list
_FIELD = re.compile(r"^\s{2,}\**[\w, *`.]+: ")
_SECTION = re.compile(r"^\s*(?:Args|Returns|Yields|Raises|Attributes|Examples?):\s*$")
_DIRECTIVE = re.compile(r"#\s*(?:type:|noqa|!|fmt:|[biuf]f?\d+\[)")
_FENCE = re.compile(r"\s*(?:```|~~~)")
_NOT_PROSE = re.compile(r"\s*(?:\||#|!\[|<!--)")
_BULLET = re.compile(r"\s*(?:[-*+]|\d+\.) ")
_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")

Line = tuple[int, str]
HasDocstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Block(NamedTuple):
    """Consecutive lines of prose.

    Attributes:
      source: "imperative" for a docstring whose first sentence should have a verb, "page" for Markdown,
        "short" for a docstring that says too little, and "text" for anything else.
    """

    source: str
    lines: Sequence[Line]


class Finding(NamedTuple):
    """One place; `where` is a path, or the hash of a commit, whose `line` is 0."""

    where: str
    line: int
    kind: str
    text: str


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_list("paths", [], "Files or folders instead of all tracked files.")
    flags.DEFINE_string("since", None, "Check what was added since this revision, commit subjects included.")


def findings_of(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in the text of a Python or Markdown file."""
    for source, lines in _markdown_blocks(text) if path.endswith(".md") else _python_blocks(text):
        if source == "short":
            yield Finding(path, lines[0][0], SHORT_DOCSTRING, lines[0][1])
            continue
        for line, sentence in _sentences(lines):
            for kind in _kinds(path, source, sentence):
                yield Finding(path, line, kind, sentence)


def _kinds(path: str, source: str, sentence: str) -> Iterator[str]:
    plain = _CODE.sub(" x ", sentence)
    words = re.findall(r"[A-Za-z][\w'-]*", plain)
    for kind, pattern in _PATTERNS.items():
        for _ in pattern.findall(plain):
            yield kind
    if len(words) > MAX_WORDS:
        yield f"sentence over {MAX_WORDS} words"
    is_statement = source in ("imperative", "page") and sentence.endswith(".") and len(words) > 1
    if is_statement and not _VERB.search(plain):
        yield NO_VERB
    if source == "page" and not path.startswith(_LOG) and len(_NUMBER.findall(plain)) > MAX_NUMBERS:
        yield f"more than {MAX_NUMBERS} numbers in a sentence"


def _sentences(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield each sentence of a block with the line that it begins in."""
    text, starts = "", []
    for number, line in lines:
        starts.append((len(text), number))
        text += line.strip() + " "
    begin = 0
    for end in (*(match.end() for match in _END.finditer(text)), len(text)):
        if sentence := text[begin:end].strip():
            first = end - len(text[begin:end].lstrip())
            yield max(number for start, number in starts if start <= first), sentence
        begin = end


def _python_blocks(text: str) -> Iterator[Block]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, HasDocstring):
            yield from _docstring_blocks(node)
    yield from _comment_blocks(text)


def _docstring_blocks(node: HasDocstring) -> Iterator[Block]:
    """Yield a docstring's paragraphs, and the items of its sections, which may be noun phrases."""
    if ast.get_docstring(node, clean=False) is None:
        return
    statement = node.body[0]
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    docstring = str(statement.value.value)
    if len(docstring.split()) < MIN_DOCSTRING and not isinstance(node, ast.Module):
        yield Block("short", [(statement.lineno, docstring)])
    source, lines = "imperative" if _is_called(node) else "text", list[Line]()
    for number, line in enumerate(docstring.split("\n"), statement.lineno):
        if not line.strip() or _SECTION.match(line) or _FIELD.match(line):
            yield Block(source, lines)
            lines = []
            source = "text" if line.strip() else source
        if line.strip() and not _SECTION.match(line):
            lines.append((number, _FIELD.sub("", line)))
    yield Block(source, lines)


def _is_called(node: ast.AST) -> bool:
    """Return whether a node is a function, and no property."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.dump(decorator) for decorator in node.decorator_list)


def _comment_blocks(text: str) -> Iterator[Block]:
    lines: list[Line] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        if lines and (token.line.lstrip()[0] != "#" or token.start[0] != lines[-1][0] + 1):
            yield Block("text", lines)
            lines = []
        lines.append((token.start[0], token.string.lstrip("# ")))
    yield Block("text", lines)


def _markdown_blocks(text: str) -> Iterator[Block]:
    """Yield paragraphs and list items, without code, tables, headings and pictures."""
    lines: list[Line] = []
    is_code = False
    for number, line in enumerate((*text.split("\n"), ""), 1):
        is_fence = _FENCE.match(line) is not None
        is_code ^= is_fence
        is_prose = bool(line.strip()) and not (is_fence or is_code or _NOT_PROSE.match(line))
        if not is_prose or _BULLET.match(line):
            yield Block("page", lines)
            lines = []
        if is_prose:
            lines.append((number, re.sub(r"^\s*(?:[-*+>]|\d+\.) ", "", line)))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def has_revision(name: str) -> bool:
    """Return whether the repository has this revision; a shallow clone lacks most."""
    command = ["git", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0


def added_lines(diff: str) -> dict[str, set[int]]:
    """Return the numbers of added lines by path, from the text of a diff without context."""
    added: defaultdict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := _HUNK.match(line):
            first = int(hunk[1])
            added[path].update(range(first, first + int(hunk[2] or 1)))
    return dict(added)


def _long_subjects(since: str) -> Iterator[Finding]:
    for line in _git("log", "--no-merges", "--format=%h %s", f"{since}..HEAD").splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > MAX_SUBJECT:
            yield Finding(commit, 0, f"commit subject over {MAX_SUBJECT}", subject)


def _is_checked(path: str) -> bool:
    return path.endswith((".py", ".md")) and (ROOT / path).is_file()


def _findings_in(paths: Iterable[str], added: Mapping[str, set[int]] | None) -> Iterator[Finding]:
    for path in filter(_is_checked, paths):
        for finding in findings_of(path, (ROOT / path).read_text(encoding="utf-8")):
            if added is None or finding.line in added[path]:
                yield finding


def main() -> int:
    """Print the findings and how many there are of each kind."""
    since = FLAGS.since
    if since is None:
        found = list(_findings_in(_git("ls-files", "--", *FLAGS.paths).splitlines(), None))
    elif has_revision(since):
        paths = FLAGS.paths or ("*.py", "*.md")
        added = added_lines(_git("diff", "-U0", "--no-color", "--no-ext-diff", since, "--", *paths))
        found = [*_findings_in(sorted(added), added), *_long_subjects(since)]
    else:
        print(f"check_prose: this clone has no {since}: added lines are not checked")
        return 0
    for finding in found:
        hint = "hint: " if finding.kind in HINTS else ""
        print(f"{finding.where}:{finding.line}: {hint}{finding.kind}: {' '.join(finding.text.split())[:120]}")
    counts = Counter(finding.kind for finding in found)
    if counts:
        print(", ".join(f"{kind}: {count}" for kind, count in counts.most_common()))
    return EXIT_FAILED if set(counts) - HINTS else 0


if __name__ == "__main__":
    define_flags()
    run(main)
