"""`scripts/dev/check_prose.py`: which sentences are findings, and where they are said to be."""

from __future__ import annotations

import textwrap

import pytest

from tests.launching import load

check_prose = load("scripts.dev.check_prose")


def found(path: str, text: str) -> list[tuple[int, str]]:
    return [(each.line, each.kind) for each in check_prose.findings_of(path, textwrap.dedent(text))]


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("Nobody reads this queue.", "person"),
        ("Pages of which copies exist are dropped.", "of which"),
        ("The first so many are kept.", "so many"),
        ("There is no page left.", "is no, are none"),
        ("Both run by turns.", "old phrase"),
        ("It says " + "very " * 35 + "much.", "sentence over 35 words"),
    ],
)
def test_a_phrase_is_found_in_comments_docstrings_and_pages(sentence, kind):
    assert found("a.py", f"# {sentence}\n") == [(1, kind)]
    assert found("a.py", f'"""{sentence}"""\n') == [(1, kind)]
    assert found("a.md", f"{sentence}\n") == [(1, kind)]
    assert found("a.py", f'text = "{sentence}"\n') == []


def test_plain_sentences_code_and_links_are_no_findings():
    assert (
        found("a.md", "Call `nobody()` at [a page](of-which.md). It is no longer used, so many as there are.")
        == []
    )
    assert found("a.md", "```\nnobody is there\n```\n| nobody | 1 |\n# Nobody\n") == []
    assert found("a.py", "x = 1  # noqa: nobody\n") == []


def test_an_item_of_a_list_begins_a_sentence():
    item = "- It says " + "very " * 20 + "much.\n"
    assert found("a.py", f'"""A list:\n\n{item * 3}"""\n') == []


def test_a_line_is_that_in_which_the_sentence_begins():
    assert found("a.py", "x = 1\n# One sentence. Whoever\n# reads the next.\n# Somebody does.\n") == [
        (2, "person"),
        (4, "person"),
    ]
    assert found("a.md", "This is one.\n\nThis is\ntwo. Nobody is three.\n") == [(4, "person")]


def test_a_docstring_of_three_words_is_short_but_for_that_of_a_module():
    assert found("a.py", '"""Three small words."""\ndef f():\n    """Return the pages."""\n') == [
        (3, check_prose.SHORT_DOCSTRING)
    ]
    assert found("a.py", 'def f():\n    """Return the free pages."""\n') == []


def test_functions_and_pages_need_verbs_and_classes_do_not():
    text = '''
        class Pool:
            """Room of one tier."""

            def take(self):
                """Room of one tier."""

            @property
            def size(self):
                """Room of one tier."""
    '''
    assert found("a.py", text) == [(6, check_prose.NO_VERB)]


def test_numbers_are_counted_on_pages_alone():
    sentence = "It took 1, 2, 3 and 4 seconds."
    assert found("a.md", sentence) == [(1, "more than 3 numbers in a sentence")]
    assert found("lab/log/a.md", sentence) == []
    assert found("a.py", f"# {sentence}\n") == []


def test_added_lines_are_read_from_a_diff():
    diff = """\
        diff --git a/a.py b/a.py
        --- a/a.py
        +++ b/a.py
        @@ -3 +3,2 @@
        -old
        +new
        +newer
        @@ -9,0 +11 @@ def f():
        +last
        diff --git a/b.md b/b.md
        --- a/b.md
        +++ b/b.md
        @@ -1,2 +0,0 @@
        -gone
        -gone
    """
    assert check_prose.added_lines(textwrap.dedent(diff)) == {"a.py": {3, 4, 11}, "b.md": set()}


def test_a_revision_that_a_clone_lacks_is_said_to_be_missing():
    assert check_prose.has_revision("HEAD")
    assert not check_prose.has_revision("HEAD~1000000")
