"""Possible mutants, and those that a seed draws; these tests need the extra `mutants`."""

from __future__ import annotations

import pytest

pytest.importorskip("cosmic_ray")

from cosmic_ray.mutating import mutate_code

from pensieve_jax import ConfigError
from pensieve_lab.mutation.candidates import find_candidates, make_mutant
from pensieve_lab.mutation.drawing import draw
from pensieve_lab.mutation.operators import OPERATORS, RemoveCall, RemoveOperand
from pensieve_lab.mutation.rooms import mirrored_folder

EXCLUDED = '''\
"""A docstring."""

from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    limit = 3 < 4

type Both = int | str


@dataclass(frozen=True)
class Pair(tuple[int, int | str]):
    """Two."""

    first: int | None

    def add(self, other: int | str) -> int | str:
        _log.info("%d", 1 + 2)
        assert other > 1, f"{1 + 1}"
        return cast("int | str", zip(self, other, strict=True))


if __name__ == "__main__":
    main(1)
'''


def changes(text, file="one.py"):
    """Return each line with its possible replacements."""
    made = [make_mutant(candidate, text) for candidate in find_candidates(file, text)]
    return [(mutant.before.strip(), mutant.after.strip()) for mutant in made if mutant is not None]


def changed(line):
    return [" ".join(after.split()) for _, after in changes(f"{line}\n")]


@pytest.mark.parametrize(
    ("line", "mutants"),
    [
        ("a = b < c", ["a = b <= c", "a = b >= c"]),
        ("a = b == c", ["a = b != c"]),
        ("a = b is None", ["a = b is not None"]),
        ("a = b + c", ["a = b - c"]),
        ("a = b[1]", ["a = b[ 2]", "a = b[ 0]"]),
        ("a = -b", ["a = +b"]),
        ("a = not b", ["a = b"]),
        (
            "a = b and c and d",
            ["a = c and d", "a = b and d", "a = b and c", "a = b or c and d", "a = b and c or d"],
        ),
        ("a = b or c", ["a = c", "a = b", "a = b and c"]),
        ("f(a)", ["pass"]),
        ("a.f(b)(c)", ["pass"]),
        ("a = f(b, *c, **d)", []),
        ("def f(a, /, b, *, c): ...", []),
        ("a = True", ["a = False"]),
        ("if a: b", ["if not a: b"]),
        ("if a < b: c", ["if a <= b: c", "if a >= b: c"]),
        ("if not a: b", ["if a: b"]),
        ("a = f'{b + c}'", ["a = f'{b - c}'"]),
        ("'a docstring with 1 < 2'", []),
    ],
)
def test_what_a_line_may_become(line, mutants):
    assert sorted(changed(line)) == sorted(mutants)


def test_what_promises_nothing_is_left_alone():
    assert changes(EXCLUDED) == []
    assert changes(EXCLUDED.replace("TYPE_CHECKING:", "CHECKING:")) != []


def test_the_assertions_of_a_checker_are_changed_and_their_messages_are_not():
    text = 'assert a < b, f"{1 + 1}"\n'
    assert changes(text) == []
    assert sorted(changes(text, "pensieve_jax/cache/integrity.py")) == [
        ('assert a < b, f"{1 + 1}"', f'assert a {operator} b, f"{{1 + 1}}"') for operator in ("<=", ">=")
    ]


def test_what_follows_on_an_excluded_line_is_still_changed():
    assert changed("a: int | None = b + c") == ["a: int | None = b - c"]
    assert changed("é: int | None = 'é' + c") == ["é: int | None = 'é' - c"]


def test_calls_keep_their_indentation_and_comment():
    assert changes("def f():\n    a(b)  # why\n") == [("a(b)  # why", "pass  # why")]


def test_mutants_say_where_they_are():
    text = "class A:\n    def f(self):\n        def g():\n            return a < b\n        return g\n"
    made = [make_mutant(candidate, text) for candidate in find_candidates("one.py", text)]
    assert [(mutant.function, mutant.candidate.line) for mutant in made] == [("A.f.g", 4)] * 2
    assert len({mutant.key for mutant in made}) == 2


@pytest.mark.parametrize(
    "operator", [RemoveOperand(), RemoveCall()], ids=lambda operator: type(operator).__name__
)
def test_own_operators_do_what_their_examples_say(operator):

    for example in operator.examples():
        assert (
            mutate_code(example.pre_mutation_code, operator, example.occurrence) == example.post_mutation_code
        )


@pytest.fixture
def project(tmp_path):
    for name, text in {
        "pensieve_jax/one/__init__.py": "",
        "pensieve_jax/one/small.py": "a = b < c\n",
        "pensieve_jax/one/large.py": "".join(f"a{i} = b{i} + c{i}\n" for i in range(20)),
        "two/__init__.py": "",
        "two/numbers.py": "".join(f"a{i} = {i}, {i}, {i}\n" for i in range(5)),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def keys(mutants):
    return [mutant.key for mutant in mutants]


def test_a_seed_draws_the_same_and_fewer_are_the_beginning(project):
    drawn = keys(draw(project, ["one", "two"], 20, 7))
    assert keys(draw(project, ["one", "two"], 20, 7)) == drawn
    assert keys(draw(project, ["one", "two"], 6, 7)) == drawn[:6]
    assert keys(draw(project, ["one"], 10, 7)) == drawn[::2]
    assert keys(draw(project, ["one", "two"], 20, 8)) != drawn


def test_rooms_give_equally_many_and_all_where_there_are_fewer(project):
    files = [mutant.candidate.file for mutant in draw(project, ["one", "two"], 20, 1)]
    assert [file.startswith("two") for file in files] == [False, True] * 10
    everything = draw(project, ["one", "two"], 1000, 1)
    assert len(set(keys(everything))) == len(everything) == 22 + 30


def test_a_line_gives_a_second_mutant_after_all_others_gave_one(project):
    lines = [mutant.candidate.line for mutant in draw(project, ["two"], 10, 1)]
    assert sorted(lines[:5]) == sorted(lines[5:]) == [1, 2, 3, 4, 5]


def test_an_unknown_room_is_an_error(project):
    with pytest.raises(ConfigError, match="--rooms is 'three', but must be a folder"):
        draw(project, ["three"], 1, 1)


def test_every_operator_has_an_own_name():
    assert len(OPERATORS) == len({id(operator) for operator in OPERATORS.values()})


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("pensieve_jax/server/http/admission.py", "tests/server/http"),
        ("model_defs/recurrent/lstm.py", "tests/models/recurrent"),
        ("pallas_kernels/rows.py", "tests/kernels"),
    ],
)
def test_mirrored_folders(file, folder):
    assert mirrored_folder(file) == folder
