"""Check every figure of README.md and of all pages, and every result document.

    # exit status 1 if a figure is wrong or has no source
    python -m pensieve_lab.programs.check_numbers
    # the figures without a document, with the reasons
    python -m pensieve_lab.programs.check_numbers --list_prose
    # each figure of a page with its source
    python -m pensieve_lab.programs.check_numbers --show=README.md
    # sections with figures that still lack a source
    python -m pensieve_lab.programs.check_numbers --propose=PAGE
    python -m pensieve_lab.programs.check_numbers --record_pictures  # after pictures were drawn again
    # after a document was added, run again or removed
    python -m pensieve_lab.programs.check_numbers --record_documents

`lab/sources/<page>.toml` says where the figures of a page come from; CONTRIBUTING.md says how. The log
(lab/log) is left out. A page without such a file must be named, with a reason, in
`lab/sources/unchecked.toml`.

The documents in lab/results are checked as well: each names a clean commit of this history, and measured load
points are recomputed from their requests. `lab/sources/documents.toml` has the SHA-256 of each document;
`lab/sources/summary_only.toml` lists the documents from before these rules. Only the git history shows that
an older document was edited together with its line there, so the check fails without the full history unless
`--allow_missing_history` is given.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_lab.pages.expressions import Documents
from pensieve_lab.pages.page import WRITTEN, Page, WordsIn, read_page
from pensieve_lab.pages.pictures import check_pictures, record_pictures
from pensieve_lab.pages.recorded import check_records, read_records, record_documents
from pensieve_lab.pages.result_documents import (
    SUMMARY_ONLY_SINCE,
    History,
    check_results,
    check_summary_only,
    read_rules,
)
from pensieve_lab.pages.sources import check_page
from pensieve_lab.programs.refresh_pages import refreshed

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[3]
PROFILES = ROOT / "lab" / "pensieve_lab" / "simulator" / "profiles"
UNCHECKED = "unchecked.toml"
SUMMARY_ONLY = "summary_only.toml"
DOCUMENTS = "documents.toml"
README = "README.md"
IN_WORDS = (
    README,
    *(f"lab/docs/{page}.md" for page in ("beside_vllm", "evaluation", "paper_and_we", "several_gpus")),
)
"""Pages on which written-out numbers are figures everywhere; on others only before the second heading."""
_WHAT_TO_DO = (
    "A wrong digit: correct the page. A new figure: --propose=PAGE drafts an entry for lab/sources. "
    "CONTRIBUTING.md describes both under 'A figure's source'."
)
FRONT_PAGE = "front_page"  # name of the repository's README; the pages have a README, too


class Checked(NamedTuple):
    """Page whose figures have been looked up, and the errors found."""

    page: Page
    errors: list[str]


def unchecked(lab: Path) -> dict[str, str]:
    """Return the pages that are not checked yet, with reasons."""
    path = lab / "sources" / UNCHECKED
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def documents_of(lab: Path) -> Documents:
    """Return the documents of the pages, with the simulator's profiles as `profiles/...`."""
    return Documents(lab, profiles=PROFILES)


def check(lab: Path, readme: Path) -> list[Checked]:
    """Check README, the product's and the laboratory's pages, except those named as unchecked."""
    left_out, documents = unchecked(lab), documents_of(lab)
    found = []
    for path in [readme, *sorted(readme.parent.glob("docs/*.md")), *sorted(lab.glob("docs/*.md"))]:
        name = path.relative_to(readme.parent).as_posix()
        if name not in left_out:
            found.append(check_file(path, name, lab, documents))
    return found


def check_file(path: Path, name: str, lab: Path, documents: Documents) -> Checked:
    """Check the text of one file as that of the page `name`."""
    page = read(path, name)
    sources = lab / "sources" / f"{FRONT_PAGE if name == README else Path(name).stem}.toml"
    if sources.is_file():
        errors = check_page(page, sources, documents, lab.parent)
    else:
        errors = [f"{name}: {sources.relative_to(lab.parent)} is missing"] * any(page.figures)
    if is_written(name):
        errors += stale_tables(name, path.read_text(encoding="utf-8"))
    return Checked(page, errors)


def read(path: Path, name: str) -> Page:
    """Read the figures of a file as those of the page `name`."""
    words: WordsIn = "page" if name in IN_WORDS else "lead"
    return read_page(path, name, is_written=is_written(name), words=words)


def is_written(name: str) -> bool:
    """Return whether `refresh_pages.py` writes tables of this page."""
    return name in [f"lab/docs/{page}" for page in WRITTEN]


def stale_tables(name: str, text: str) -> list[str]:
    """Return errors for tables of a page that differ from what `refresh_pages.py` would write."""
    try:
        _, changed = refreshed(text)
    except ConfigError as error:
        return [f"{name}: {error}"]
    return [
        f"{name}: table {table} differs from its documents; run pensieve_lab.programs.refresh_pages"
        for table in changed
    ]


def coverage(checked: Iterable[Checked]) -> list[str]:
    """Return a line per page with its numbers of figures, of sourced ones, and of prose."""
    lines = [f"{'page':32}{'figures':>9}{'sourced':>9}{'prose':>7}"]
    totals = [0, 0, 0]
    for page, _ in checked:
        figures = [figure for _, figure in page.figures]
        prose = sum(figure.is_prose for figure in figures)
        sourced = sum(figure.source is not None for figure in figures) - prose
        totals = [a + b for a, b in zip(totals, (len(figures), sourced, prose), strict=True)]
        lines.append(f"{page.name:32}{len(figures):9}{sourced:9}{prose:7}")
    return [*lines, f"{'all':32}{totals[0]:9}{totals[1]:9}{totals[2]:7}"]


def prose(checked: Iterable[Checked]) -> list[str]:
    """Return the figures without a document, by page and reason."""
    lines = []
    for page, _ in checked:
        by_reason: dict[str, list[str]] = defaultdict(list)
        for _, figure in page.figures:
            if figure.is_prose:
                by_reason[figure.source or ""].append(figure.shown)
        lines += [f"{page.name}: {reason}: {' '.join(shown)}" for reason, shown in by_reason.items()]
    return lines


def sources_of(page: Page) -> list[str]:
    """Return a line for each figure of a page: its line, and the expression or reason that it comes from."""
    return [
        f"{page.name}:{text.line}: {figure.shown}: {figure.source or 'has no source'}"
        for text, figure in page.figures
    ]


def proposal(page: Page) -> list[str]:
    """Return an entry of prose for each section with figures that lack a source.

    A figure of a document belongs in an expression instead; the others need a kind and a reason.
    """
    by_heading: dict[str, list[str]] = defaultdict(list)
    for text, figure in page.figures:
        if figure.source is None:
            by_heading[text.heading].append(figure.shown)
    return [
        f'[[prose]]\nheading = "{heading}"\nkind = ""\nreason = ""\nfigures = "{" ".join(shown)}"\n'
        for heading, shown in by_heading.items()
    ]


def document_errors(lab: Path, history: History, *, allow_missing_history: bool = False) -> list[str]:
    """Return the errors of the documents in lab/results, and of the history that vouches for them."""
    folder, sources = lab / "results", lab / "sources"
    rules = read_rules(sources / SUMMARY_ONLY)
    return [
        *history_errors(history, allow_missing_history=allow_missing_history),
        *check_results(folder, rules, history),
        *check_summary_only(folder, rules, history, SUMMARY_ONLY_SINCE),
        *check_records(folder, rules, read_records(sources / DOCUMENTS)),
    ]


def history_errors(history: History, *, allow_missing_history: bool) -> list[str]:
    """Return a sentence if commits cannot be looked up and that is not allowed."""
    if history.notice is None or allow_missing_history:
        return []
    return [f"{history.notice}. Run `git fetch --unshallow`, or give --allow_missing_history"]


def record(lab: Path, history: History, *, allow_missing_history: bool) -> int:
    """Record the digests of documents that pass all other checks; return the exit status."""
    folder, sources = lab / "results", lab / "sources"
    rules = read_rules(sources / SUMMARY_ONLY)
    errors = history_errors(history, allow_missing_history=allow_missing_history)
    if errors := [*errors, *check_results(folder, rules, history)]:
        print("\n".join([*errors, "no digest was recorded"]))
        return EXIT_FAILED
    changed, refused = record_documents(folder, sources / DOCUMENTS, rules)
    print("\n".join([*changed, *refused]) or "every document is recorded")
    return EXIT_FAILED if refused else 0


def main() -> int:
    lab = ROOT / "lab"
    if FLAGS.record_pictures:
        print("\n".join(record_pictures(lab, documents_of(lab))) or "no picture was drawn again")
        return 0
    history, allowed = History(ROOT), FLAGS.allow_missing_history
    if history.notice and allowed:
        print(f"not checked: {history.notice}")
    if FLAGS.record_documents:
        return record(lab, history, allow_missing_history=allowed)
    checked = check(lab, ROOT / README)
    for name, lines_of in ((FLAGS.show, sources_of), (FLAGS.propose, proposal)):
        if name:
            pages = {page.name: page for page, _ in checked}
            if name not in pages:
                raise ConfigError("the page", name, f"one of {', '.join(pages)}")
            print("\n".join(lines_of(pages[name])))
            return 0
    print("\n".join(prose(checked) if FLAGS.list_prose else coverage(checked)))
    for name, reason in unchecked(lab).items():
        print(f"not checked: {name} ({reason})")
    errors = [error for _, errors in checked for error in errors]
    errors += document_errors(lab, history, allow_missing_history=allowed)
    errors += check_pictures(lab, documents_of(lab))
    done = "every figure with a source matches its document; --list_prose lists the others"
    print("\n".join([*errors, _WHAT_TO_DO] if errors else [done]))
    return EXIT_FAILED if errors else 0


def define_flags() -> None:
    flags.DEFINE_bool("list_prose", False, "List the figures without a document, with the reasons.")
    flags.DEFINE_bool("record_pictures", False, "Write the digests of pictures that were drawn again.")
    flags.DEFINE_bool("record_documents", False, "Write the digests of documents that are new or run again.")
    flags.DEFINE_bool(
        "allow_missing_history",
        False,
        "Pass without the full git history, which shows edits of old documents.",
    )
    flags.DEFINE_string("show", None, "Print each figure of this page with its source.")
    flags.DEFINE_string("propose", None, "Print entries for this page's figures without a source.")


if __name__ == "__main__":
    define_flags()
    run(main)
