"""The figures of the pages equal those of their documents, and any wrong digit is detected."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pensieve_lab.pages import kinds, number_words, pictures
from pensieve_lab.pages.expressions import Documents, ExpressionError, read_document
from pensieve_lab.pages.page import Page, read_page
from pensieve_lab.pages.sources import check_page, is_shown
from tests.launching import load

check_numbers = load("check_numbers")

LAB = check_numbers.ROOT / "lab"
README = check_numbers.ROOT / "README.md"
NO_PAGES = {"code_blocks", "documents", "papers", "pictures", "removed", "summary_only", "unchecked"}
SOURCED = sorted({path.stem for path in (LAB / "sources").glob("*.toml")} - NO_PAGES)
PAGES = {path.stem: path for folder in ("docs", "lab/docs") for path in (LAB.parent / folder).glob("*.md")}
PAGE = """# A page
JAX 0.4 serves 12 tokens of `llama2-13b` on an H200, 3.5 times
as many ([there](other_page_7.md)).

    python not_counted.py --tokens=99

| model | ms | share |
|---|---|---|
| `opt-13b` | 1,234.5 (2.0) | 75% |
| other | | 8% |

## Later
1. Step one takes -0.2 ms.
"""
SOURCES = """
[documents]
run = "run.json"

[[sentence]]
text = "serves {run.num_tokens} tokens of `llama2-13b` on an H200, {run.fast / run.slow} times as many"

[[table]]
heading = "A page"
row = "=one(run.rows, model=label)"
[table.each_column]
ms = ["1e3 * row.s", "row.bound"]
share = "1e2 * row.share"

[[sentence]]
text = "takes {1e3 * min(row.s for row in run.rows) - 1000.2} ms"

[[prose]]
heading = "A page"
reason = "of JAX"
kind = "version"
figures = "0.4"

[[prose]]
heading = "Later"
reason = "the number of a step"
kind = "label"
figures = "1"
"""
DOCUMENT = """{"num_tokens": 12, "fast": 7, "slow": 2, "rows": [
  {"model": "opt-13b", "s": 1.2345, "bound": 1.96, "share": 0.7512},
  {"model": "other", "s": 1.0, "bound": 3, "share": 0.0849}]}"""


def errors_of(folder: Path, page: str = PAGE, sources: str = SOURCES, document: str = DOCUMENT) -> list[str]:
    (folder / "page.md").write_text(page)
    (folder / "page.toml").write_text(sources)
    (folder / f"run{len(list(folder.iterdir()))}.json").write_text(document)
    (folder / "run.json").write_text(document)
    return check_page(read_page(folder / "page.md", "page.md"), folder / "page.toml", Documents(folder))


def test_the_sources_of_a_page_are_shown_by_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\nIt serves 12 tokens,\n\nof 7 kinds.\n")
    sources = tmp_path / "page.toml"
    sources.write_text(
        '[documents]\nrun = "run.json"\n\n[[sentence]]\ntext = "serves {run.num_tokens} tokens"\n'
    )
    (tmp_path / "run.json").write_text('{"num_tokens": 12}')
    read = read_page(page, "page.md")
    check_page(read, sources, Documents(tmp_path))
    assert check_numbers.sources_of(read) == [
        "page.md:2: 12: run.num_tokens",
        "page.md:4: 7: has no source",
    ]


def test_every_page_is_checked_or_named() -> None:
    checked = {found.page.name for found in check_numbers.check(LAB, README)}
    pages = {path.relative_to(LAB.parent).as_posix() for path in PAGES.values()} | {"README.md"}
    assert checked | set(check_numbers.unchecked(LAB)) == pages


def test_the_figures_of_the_pages_are_those_of_their_documents(capsys: pytest.CaptureFixture[str]) -> None:
    checked = check_numbers.check(LAB, README)
    assert [error for _, errors in checked for error in errors] == []
    print("\n".join(check_numbers.coverage(checked)))


@pytest.mark.parametrize("stem", SOURCED)
def test_a_wrong_digit_is_seen(stem: str) -> None:
    """The last digit of every figure with a document is changed; some figures of a page run the whole
    check."""
    path = README if stem == check_numbers.FRONT_PAGE else PAGES[stem]
    sources, documents = LAB / "sources" / f"{stem}.toml", check_numbers.documents_of(LAB)
    page = check_numbers.read(path, path.relative_to(check_numbers.ROOT).as_posix())
    unchecked = pickle.dumps(page)  # copies of it are made faster than it is read again
    assert check_page(page, sources, documents, check_numbers.ROOT) == []
    figures = [figure for _, figure in page.figures]
    assert not [f for f in figures if f.value is not None and is_shown(f.value, with_another_digit(f.shown))]
    for number in range(0, len(figures), len(figures) // 10 + 1):
        page = pickle.loads(unchecked)
        _, figure = list(page.figures)[number]
        if figure.source is not None:
            continue  # of a table that a script writes
        figure.shown = with_another_digit(figure.shown)
        assert check_page(page, sources, documents, check_numbers.ROOT), (
            f"{figure.shown} in place of another figure"
        )


def with_another_digit(shown: str) -> str:
    """Increase the last digit before an exponent, 9 to 0; replace a number in words by another."""
    if number_words.worth(shown) is not None:
        return "a-hundredth" if shown != "a-hundredth" else "half"
    mantissa, mark, exponent = shown.partition("e")
    return f"{mantissa[:-1]}{(int(mantissa[-1]) + 1) % 10}{mark}{exponent}"


def figures_of(page: Page) -> list[str]:
    return [figure.shown for _, figure in page.figures]


def test_what_a_figure_is(tmp_path: Path) -> None:
    assert errors_of(tmp_path) == []
    page = read_page(tmp_path / "page.md", "page.md")
    assert figures_of(page) == ["0.4", "12", "3.5", "1234.5", "2.0", "75", "8", "1", "-0.2"]
    (tmp_path / "page.md").write_text(
        "GPT-2, 3x4, float32, the 99th, Llama-2-13B and x_5 are names; 5-6, (7), +8%, 9e-06, 1.2.3 are not.\n"
    )
    found = figures_of(read_page(tmp_path / "page.md", "page.md"))
    assert found == ["5", "6", "7", "+8", "9e-06", "1.2.3"]


def test_a_number_with_a_unit_is_a_figure(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "It is 3x as fast, answers in 5ms and 1.5\u00b5s, 20K requests and 7GiB; "
        "2.7a, 13B, 10b and 1st are names.\n"
    )
    found = figures_of(read_page(tmp_path / "page.md", "page.md"))
    assert found == ["3", "5", "1.5", "20", "7"]


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("Ours takes < 5 ms, theirs > 3 ms", ["5", "3"]),
        ("Ours takes <5 ms, theirs >3 ms", ["5", "3"]),
        ("It is a <b 5 ms> faster, <b, 6> and </b 7>", ["5", "6", "7"]),
        ("A <br/> <b>4</b> <img width=\"8\" src='9.png'> <!-- 10 > 11 --> <https://a.b/12>", ["4"]),
        ('One [link](page_1.md#part-2), [titled](page_3.md "4") and [x](5 ms)', ["5"]),
    ],
)
def test_only_tags_and_addresses_hide_figures(tmp_path: Path, text: str, figures: list[str]) -> None:
    (tmp_path / "page.md").write_text(f"{text}\n")
    assert figures_of(read_page(tmp_path / "page.md", "page.md")) == figures


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("5ms-9ms, 2x-3x, 5 ms-9 ms", ["5", "9", "2", "3", "5", "9"]),
        ("1.5\u00b5s-3\u00b5s, 2x-3x-4x and 5%-9%", ["1.5", "3", "2", "3", "4", "5", "9"]),
        ("A 13B-7 and opt-13b-8 are names", []),
    ],
)
def test_both_ends_of_a_range_with_units_are_figures(tmp_path: Path, text: str, figures: list[str]) -> None:
    (tmp_path / "page.md").write_text(f"{text}\n")
    assert figures_of(read_page(tmp_path / "page.md", "page.md")) == figures


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("one and a half times", 1.5), ("two and a half", 2.5), ("three-and-a-quarter-fold", 3.25)),
        *(("four and a third times", 13 / 3), ("quadruple", 4), ("quadrupled", 4), ("quintupled", 5)),
        *(("doubling", 2), ("ten", 10), ("thirteen", 13), ("fourteen", 14), ("sixteen times", 16)),
        *(
            ("seventeen", 17),
            ("eighteen-fold", 18),
            ("nineteen percent", 19),
            ("twenty and a half times", 20.5),
        ),
    ],
)
def test_the_worth_of_a_number_in_words(text: str, value: float) -> None:
    ((shown, start, end),) = number_words.find(f"It is {text}.")
    assert (start, end) == (6, 6 + len(text))
    assert number_words.worth(shown) == pytest.approx(value)


def test_numbers_in_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\nHalf of it, two thirds, *a tenth*, twice, three times, ten-fold, a dozen,\n"
        "twenty-five, ten percent and one in a hundred; the third of three, half-done, dozens, 5.5 million, "
        "`half` of Two.\n\n"
        "## A section\n\nHalf of 5.\n"
    )
    words = ["half", "two-thirds", "a-tenth", "twice", "three-times", "ten-fold", "a-dozen", "twenty-five"]
    words += ["ten-percent", "a-hundred"]
    assert figures_of(read_page(page, "page.md")) == ["5.5", "5"]
    assert figures_of(read_page(page, "page.md", words="lead")) == [*words, "5.5", "half", "5"]
    assert figures_of(read_page(page, "page.md", words="page")) == [*words, "5.5", "half", "half", "5"]
    values = [number_words.worth(word) for word in words]
    assert values == [0.5, pytest.approx(2 / 3), 0.1, 2, 3, 10, 12, 25, 10, 100]
    assert number_words.worth("5.5") is None
    assert (
        is_shown(0.63, "two-thirds") and not is_shown(0.55, "two-thirds") and not is_shown(True, "two-thirds")
    )


def test_a_number_in_words_has_a_value(tmp_path: Path) -> None:
    page, sources = tmp_path / "page.md", tmp_path / "page.toml"
    (tmp_path / "run.json").write_text('{"share": 0.66}')
    sources.write_text('[documents]\nrun = "run.json"\n[[sentence]]\ntext = "takes {run.share} of it"\n')
    for words, is_right in (("two thirds", True), ("half", False), ("two", None), ("66%", False)):
        page.write_text(f"It takes {words} of it.\n")
        errors = check_page(read_page(page, "page.md", words="page"), sources, Documents(tmp_path))
        assert (errors == []) is bool(is_right), errors


def test_numbers_of_code(tmp_path: Path) -> None:
    """Comments, output and numbers in a sentence's code count as figures; settings do not."""
    (tmp_path / "page.md").write_text(
        "`a=1` `b: 2,` `3` `--rates=4` `f(5)` `x[6]` `opt-13b` `NAME=7` `a_8.json` `is 9.`\n\n"
        '```python\nx = 10  # 11 of f(12)\n```\n\n```json\n{"a": 13}\n```\n\n'
        "```sh\npython run.py --rates=14 15  # --rates=16 took 17 s\nA=18 run\n```\n\n"
        "```\n19 tokens, --rates=20\n```\n\n    python indented.py --tokens=21\n"
    )
    found = figures_of(read_page(tmp_path / "page.md", "page.md"))
    assert found == ["1", "2", "3", "9", "11", "12", "17", "19"]


def test_what_a_script_writes_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("1\n\n<!-- table x -->\n| 2 |\n|---|\n| 3 |\n<!-- end -->\n\n4\n")
    for is_written, shown in ((True, ["1", "4"]), (False, ["1", "2", "3", "4"])):
        page = read_page(tmp_path / "page.md", "page.md", is_written=is_written)
        assert [figure.shown for _, figure in page.figures if figure.source is None] == shown


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("12 tokens", "13 tokens", "shows 13, but run.num_tokens is 12"),
        ("3.5 times", "3.6 times", "shows 3.6"),
        ("1,234.5", "1,234.4", "shows 1234.4"),
        ("(2.0)", "(2.1)", "shows 2.1"),
        ("75%", "76%", "shows 76"),
        ("-0.2 ms", "0.2 ms", "shows 0.2"),
        ("3.5 times", "3.5 times and 3x", "3 has no source"),
        ("tokens=99", "tokens=99  # 98 of them", "98 has no source"),
        ("JAX 0.4", "JAX 0.5", "list 0.4, which is not there"),
        ("as many", "as many, on 8 devices", "8 has no source"),
        ("| other | |", "| other | 5 (3) 4 |", "4 has no source"),
        ("| other |", "| another |", "0 rows have"),
        ("| ms |", "| seconds |", "no columns \\['ms'\\]"),
    ],
)
def test_a_page_that_says_something_else(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in PAGE
    errors = errors_of(tmp_path, PAGE.replace(old, new))
    with pytest.raises(AssertionError, match=words):
        raise AssertionError("\n".join(errors))


def test_a_document_that_says_something_else(tmp_path: Path) -> None:
    errors = errors_of(tmp_path, document=DOCUMENT.replace("0.7512", "0.7449"))
    assert len(errors) == 1 and "shows 75" in errors[0]


def test_rounding_is_to_the_digits_shown() -> None:
    assert is_shown(0.0264, "0.026") and not is_shown(0.0266, "0.026")
    assert is_shown(7.86e-06, "7.9e-06") and not is_shown(7.84e-06, "7.9e-06")
    assert is_shown(2.5, "2") and not is_shown(2.5, "3") and is_shown(2.51, "3")
    assert not is_shown(True, "1") and not is_shown("1", "1") and not is_shown(1.2, "1.2.3")


@pytest.mark.parametrize(
    "expression",
    [
        "().__class__",
        "__import__('os')",
        "(lambda: 1)()",
        "run.rows.count(1)",
        "[x := 1]",
        "f'{run}'",
        "open('run.json')",
        "document('../run.json')",
        "1 / 0",
        "run.nothing",
        "1 +",
    ],
)
def test_what_an_expression_may_not_be(tmp_path: Path, expression: str) -> None:
    with pytest.raises(ExpressionError):
        Documents(tmp_path).value(expression, {"run": {"rows": [1]}})


def test_documents_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.json").write_text('{"s": 3}')
    (tmp_path / "outside.json").write_text('{"s": 4}')
    documents = Documents(tmp_path / "docs", profiles=tmp_path / "kept")
    assert documents.value("document('profiles/a.json').s", {}) == 3
    for name in ("kept/a.json", "profiles/../outside.json", "profiles"):
        with pytest.raises(ExpressionError, match="no such document"):
            documents.read(name)


def test_a_figure_at_a_latency(tmp_path: Path) -> None:
    """Levels of documents, and of points alone; of requests, or of another figure."""
    one, two = (
        {"requests_per_s": served, "rate": rate, "normalized_latency_s": {"mean": mean_s}}
        for served, rate, mean_s in ((9.0, 2.0, 0.012), (12.0, 3.0, 0.024))
    )
    a, b, both = ({"results": {"points": points}} for points in ([one], [two], [one, two]))
    names = {"a": a, "b": b, "both": both, "points": [one, two]}
    documents = Documents(tmp_path)
    for runs in ("[a, b]", "points", "[both]"):
        assert documents.value(f"at_latency(0.02, {runs})", names) == pytest.approx(11)
    assert documents.value("at_latency(0.018, [both], 'rate')", names) == pytest.approx(2.5)
    assert documents.value("at_latency(0.03, [both])", names) is None


def test_the_exit_status_says_whether_all_is_right(
    launch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab" / "sources").mkdir(parents=True)
    (tmp_path / "lab" / "results").mkdir()
    rules = "[kinds]\n[computed]\n[summary_only]\n[attachments]\n"
    (tmp_path / "lab" / "sources" / check_numbers.SUMMARY_ONLY).write_text(rules)
    (tmp_path / "README.md").write_text("It takes 5 s.\n")
    (tmp_path / "lab" / "run.json").write_text('{"s": 4.9}')
    sources = tmp_path / "lab" / "sources" / "front_page.toml"
    monkeypatch.setattr(check_numbers, "ROOT", tmp_path)
    flags = {"allow_missing_history": True, "shared_llm": False}
    assert launch("check_numbers", **flags) == 1
    assert "front_page.toml is missing" in capsys.readouterr().out
    sources.write_text('[documents]\nrun = "run.json"\n[[sentence]]\ntext = "takes {run.s} s"\n')
    assert launch("check_numbers", **flags) == 0
    assert "every figure with a source matches its document" in capsys.readouterr().out
    assert launch("check_numbers", shared_llm=False) == 1
    assert "there is no git history" in capsys.readouterr().out
    (tmp_path / "README.md").write_text("It takes 4 s.\n")
    assert launch("check_numbers", **flags) == 1
    assert "README.md:1: shows 4, but run.s is 4.9" in capsys.readouterr().out


ATTACKS = [
    ("README.md", "bfloat16 | **15.6** |", "bfloat16 | **15.7** |"),
    ("README.md", "answers 1.2 to 1.4 times", "answers 1.2 to 1.5 times"),
    ("README.md", "token takes 11.2 ms", "token takes 10.2 ms"),
    ("README.md", "vLLM's 19.7 at", "vLLM's 29.7 at"),
    ("README.md", "fp8 KV cache | 16.6 |", "fp8 KV cache | 15.6 |"),
    ("README.md", "`recomputed_tokens=45`", "`recomputed_tokens=145`"),
    ("README.md", "\n## Install", "\nIt is 3x as fast and answers in 5ms, 20K requests.\n\n## Install"),
    ("README.md", "\n## Install", "\nIt takes half of vLLM's time.\n\n## Install"),
    ("README.md", "\n## Install", "\nIt is quadrupled.\n\n## Install"),
    ("README.md", "think for 20 s", "think for 21 s"),
    ("README.md", "40 GB of device", "50 GB of device"),
    ("README.md", "Other commands are", "The 9,000 other commands are"),
    ("lab/docs/beside_vllm.md", "takes two thirds of vLLM's time", "takes half of vLLM's time"),
    ("docs/cells.md", "# [4, 2]", "# [4, 3]"),
    ("lab/docs/paper_and_we.md", "| 4,096 |", "| 4,097 |"),
    ("lab/docs/paper_and_we.md", "<!-- table summary -->\n", "<!-- table summary --> \n"),
    ("lab/docs/paper_and_we.md", "<!-- end -->\n", "<!-- end --> \n\nIt takes 9 ms.\n"),
    ("lab/docs/paper_and_we.md", "<!-- table summary -->", "<!-- table figure99 -->"),
]


@pytest.mark.parametrize(("name", "old", "new"), ATTACKS)
def test_an_attack_on_a_page_is_seen(tmp_path: Path, name: str, old: str, new: str) -> None:
    """Each of these edits went unnoticed once, or resembles one that did."""
    text = (check_numbers.ROOT / name).read_text(encoding="utf-8")
    assert old in text, "the page has changed: attack what it says now"
    (tmp_path / "page.md").write_text(text.replace(old, new, 1), encoding="utf-8")
    found = check_numbers.check_file(tmp_path / "page.md", name, LAB, check_numbers.documents_of(LAB))
    assert found.errors


PROSE = '[[prose]]\nheading = "How fast"\nreason = "so it is"\nkind = {}\nfigures = "{}"\n'
ATTACKS_ON_BOTH = [
    *(("takes half of vLLM's time", PROSE.format(f'"{kind}"', "half")) for kind in ("wording", "definition")),
    *(("takes half of vLLM's time", PROSE.format(f'"{kind}"', "half")) for kind in ("size", "constant")),
    *(("takes half of vLLM's time", PROSE.format(f'"{kind}"', "half")) for kind in ("example", "aim")),
    ("takes half of vLLM's time", '[[sentence]]\ntext = "takes {0.5} of vLLM\'s time"\n'),
    ("answers in 9 ms", PROSE.format('"version"', "9")),
    ("answers in 18 ms", PROSE.format('"aim"', "18")),
    ("answers in 18 ms", PROSE.format('["aim", "size"]', "18")),
    ("is 90 times as fast", PROSE.format('"setting"', "90")),
    ("is 60 times as fast", PROSE.format('"setting"', "60")),
    (
        "takes 45 ms",
        PROSE.format('"tested"\ntest = "tests/test_front_page.py::test_the_example_runs_twice"', "45"),
    ),
]


@pytest.mark.parametrize(("words", "entry"), ATTACKS_ON_BOTH)
def test_an_attack_on_the_front_page_and_its_sources_is_seen(tmp_path: Path, words: str, entry: str) -> None:
    """A figure and the source that justifies it are added together."""
    text, sources = README.read_text(encoding="utf-8"), LAB / "sources" / "front_page.toml"
    (tmp_path / "page.md").write_text(
        text.replace("\n## Documentation", f"\nIt {words}.\n\n## Documentation", 1)
    )
    (tmp_path / "page.toml").write_text(f"{sources.read_text(encoding='utf-8')}\n{entry}")
    page = check_numbers.read(tmp_path / "page.md", "README.md")
    assert check_page(page, tmp_path / "page.toml", check_numbers.documents_of(LAB), check_numbers.ROOT)


def test_the_front_page_has_what_it_names_and_no_kind_that_may_not_stand_there() -> None:
    entries = tomllib.loads((LAB / "sources" / "front_page.toml").read_text(encoding="utf-8"))["prose"]
    assert {(entry["heading"], entry["kind"]): entry["figures"] for entry in entries} == kinds.FRONT_PAGE
    assert all(kinds.KINDS[kind].may_stand_on_front_page for _, kind in kinds.FRONT_PAGE)


@pytest.mark.parametrize(
    ("kind", "figures", "words"),
    [
        ('"because"', "3.5", "kind is 'because'; it must be one of setting"),
        ("[]", "3.5", "kind is missing"),
        ('"reading"', "3.5", "on the front page such a figure needs a document"),
        ('"status"', "3.5", "3.5 is not of the form of status"),
        ('"tested"', "3.5", "there is no such test"),
        ('["status", "setting"]', "3.5", "each kind has an entry of its own"),
        ('"setting"', "3.5", "3.5 is not a setting or flag of the page's documents"),
        ('"constant"', "3.5", "kinds.FRONT_PAGE"),
        ('"definition"', "3.5", "on the front page such a figure needs a document"),
        ('"size"', "3.5", None),
    ],
)
def test_reasons_are_of_a_closed_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, figures: str, words: str | None
) -> None:
    monkeypatch.setattr(kinds, "FRONT_PAGE", {("", "size"): "3.5", ("", "setting"): "3.5"})
    (tmp_path / "page.md").write_text("It takes 3.5 s.\n")
    (tmp_path / "page.toml").write_text(
        f'[[prose]]\nheading = ""\nreason = "so it is"\nkind = {kind}\n'
        f'test = "tests/a.py::test_a"\nfigures = "{figures}"\n'
    )
    page = read_page(tmp_path / "page.md", "README.md")
    errors = check_page(page, tmp_path / "page.toml", Documents(tmp_path), tmp_path)
    assert errors == [] if words is None else words in "\n".join(errors)


@pytest.mark.parametrize(
    "document",
    [
        '{"command": "a.py --window_s=3.5 --json=a.json"}',
        '{"command": "a.py --rates=1,3.5GB"}',
        '{"results": {"settings": {"window_s": 3.5}}}',
        '{"results": {"systems": [{}, {"config": {"cache": {"share": 3.5}}}]}}',
    ],
)
def test_a_setting_on_the_front_page_is_that_of_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    monkeypatch.setattr(kinds, "FRONT_PAGE", {("", "setting"): "3.5"})
    (tmp_path / "page.md").write_text("It takes 3.5 s.\n")
    (tmp_path / "run.json").write_text(document)
    (tmp_path / "page.toml").write_text(
        '[documents]\nrun = "run.json"\n[[prose]]\nheading = ""\nreason = "a run"\nkind = "setting"\n'
        'figures = "3.5"\n'
    )
    page = read_page(tmp_path / "page.md", "README.md")
    read_document.cache_clear()
    assert check_page(page, tmp_path / "page.toml", Documents(tmp_path), tmp_path) == []
    (tmp_path / "run.json").write_text(document.replace("3.5", "3.6"))
    read_document.cache_clear()
    page = read_page(tmp_path / "page.md", "README.md")
    assert "3.5 is not a setting" in "".join(check_page(page, tmp_path / "page.toml", Documents(tmp_path)))


def test_pictures_are_of_their_documents() -> None:
    assert pictures.check_pictures(LAB, check_numbers.documents_of(LAB)) == []


def test_a_picture_of_other_data_is_seen(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    for folder in (lab / "sources", tmp_path / "docs"):
        folder.mkdir(parents=True)
    (lab / "run.json").write_text('{"command": "a", "results": {"s": 1}}')
    (tmp_path / "docs" / "a.png").write_bytes(b"one")
    (lab / "sources" / "pictures.toml").write_text(
        '[[picture]]\npath = "docs/a.png"\ndocuments = ["run.json"]\n'
    )

    def errors() -> str:
        read_document.cache_clear()
        return "\n".join(pictures.check_pictures(lab, Documents(lab)))

    assert "data is None" in errors()
    assert pictures.record_pictures(lab, Documents(lab)) == ["docs/a.png"]
    assert errors() == ""
    (lab / "run.json").write_text('{"command": "b", "results": {"s": 1}}')
    assert errors() == ""
    (lab / "run.json").write_text('{"command": "b", "results": {"s": 2}}')
    assert "draw it again" in errors()
    assert pictures.record_pictures(lab, Documents(lab)) == [], "it was not drawn again"
    assert "draw it again" in errors()
    (tmp_path / "docs" / "a.png").write_bytes(b"two")
    assert "picture is" in errors()
    assert pictures.record_pictures(lab, Documents(lab)) == ["docs/a.png"]
    (tmp_path / "docs" / "b.svg").write_bytes(b"three")
    assert errors() == "docs/b.svg: has no entry in sources/pictures.toml"
