"""What is stored and printed of a run, and the manual list of equivalent mutants."""

from __future__ import annotations

import pytest

from lab.tests.mutation import toy
from pensieve_jax import ConfigError
from pensieve_lab.mutation import report
from pensieve_lab.mutation.equivalents import FILE, change_of, read_equivalents
from pensieve_lab.mutation.trees import Tree
from pensieve_lab.mutation.trial import KILLED, SURVIVED, TIMED_OUT, Verdict
from pensieve_lab.mutation.verdicts import VerdictStore
from tests.launching import ROOT

MUTANT = toy.mutant("    return min(value, most)", "    return max(value, most)", "clip")
OTHER = toy.mutant("    return 4", "    return 5", "never_called")
ENTRY = """\
[[equivalent]]
file = "toy/limits.py"
function = "clip"
operator = "ByHand"
before = "return min(value, most)"
after = "return max(value, most)"
reason = "its only caller passes equal values"
"""


def verdict(mutant, outcome=KILLED, tree="tree", test="tests/test_a.py::test_b"):
    return Verdict(mutant.key, tree, outcome, test, "assert 1 == 2", 3, 2, 1.5, 120.0)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    VerdictStore(path).add(verdict(MUTANT))
    VerdictStore(path).add(verdict(OTHER, SURVIVED))
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    store = VerdictStore(path)
    assert store.current(MUTANT, "tree", 120.0) == verdict(MUTANT)
    assert store.current(OTHER, "tree", 120.0) == verdict(OTHER, SURVIVED)
    store.add(verdict(MUTANT, SURVIVED, "new tree"))
    assert VerdictStore(path).current(MUTANT, "new tree", 120.0) == verdict(MUTANT, SURVIVED, "new tree")


def test_a_verdict_on_other_tests_or_another_budget_is_none_but_names_the_test(tmp_path):
    store = VerdictStore(tmp_path / "verdicts.jsonl")
    store.add(verdict(MUTANT))
    store.add(verdict(OTHER, SURVIVED))
    assert store.current(MUTANT, "new tree", 120.0) is None
    assert store.current(MUTANT, "tree", 60.0) is None
    assert store.killer(MUTANT) == "tests/test_a.py::test_b"
    assert store.killer(OTHER) == ""


def test_a_mutant_that_timed_out_is_tried_again(tmp_path):
    store = VerdictStore(tmp_path / "verdicts.jsonl")
    store.add(verdict(MUTANT, TIMED_OUT))
    assert store.current(MUTANT, "tree", 120.0) is None
    assert store.killer(MUTANT) == ""


def test_survivors_are_listed_and_the_last_line_has_the_share():
    third = toy.mutant("        count -= 1", "        count += 1", "count_down")
    results = [(MUTANT, verdict(MUTANT)), (OTHER, verdict(OTHER, SURVIVED, test=""))]
    results += [(third, verdict(third, TIMED_OUT))]
    lines = list(report.report(results, [(third, "a reason")]))
    assert lines[0] == "timed out: toy/limits.py:18 ByHand"
    assert "survived: toy/limits.py:32 ByHand" in lines
    start = lines.index("survived: toy/limits.py:32 ByHand")
    assert lines[start + 1 : start + 5] == [
        "    in never_called",
        "    - return 4",
        "    + return 5",
        "    3 tests run, 2 more did not fit the budget",
    ]
    assert lines[-1] == "caught 1 of 2 decided (50.0%); undecided by time-out: 1; equivalent: 1"


def test_without_a_decided_mutant_there_is_no_share():
    assert list(report.report([], [])) == [
        "caught 0 of 0 decided (none); undecided by time-out: 0; equivalent: 0"
    ]


@pytest.fixture
def project(tmp_path):
    toy.make(tmp_path)
    (tmp_path / FILE).write_text(ENTRY)
    return tmp_path


def test_an_equivalent_mutant_is_known_by_its_lines(project):
    assert read_equivalents(project) == {change_of(MUTANT): "its only caller passes equal values"}
    assert change_of(OTHER) not in read_equivalents(project)
    (project / FILE).unlink()
    assert read_equivalents(project) == {}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("return min(value, most)", "return min(value, 3)", "entry 1, before is"),
        ("toy/limits.py", "toy/gone.py", "must be lines of toy/gone.py"),
        ('operator = "ByHand"\n', "", "must be fields file"),
        ("its only caller passes equal values", "", "must be fields file"),
    ],
)
def test_an_entry_that_is_out_of_date_is_an_error(project, before, after, message):
    (project / FILE).write_text(ENTRY.replace(before, after, 1))
    with pytest.raises(ConfigError, match=message):
        read_equivalents(project)


def test_the_entries_of_this_repository_are_current():
    assert read_equivalents(ROOT)


def test_a_copy_follows_the_checkout(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    (source / "a.py").write_text("1")
    (source / "b.py").write_text("2")
    Tree(source, copy, ["a.py", "b.py"])
    (copy / "c.py").write_text("left behind")
    (source / "a.py").write_text("3")
    tree = Tree(source, copy, ["a.py"])
    assert {path.name: path.read_text() for path in copy.iterdir()} == {"a.py": "3"}
    before = (copy / "a.py").stat().st_mtime_ns
    with tree.changed("a.py", "4"):
        assert (copy / "a.py").read_text() == "4"
        assert int((copy / "a.py").stat().st_mtime) != before // 10**9
    assert (copy / "a.py").read_text() == "3"
