"""The check of replies with schemas: its judge, its draw, and a bug that it must find."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.model_source import source_tokenizer
from pensieve_jax.text.grammar import Grammars
from pensieve_lab.schema_check.bench import Bench, compiled_cases, reason_of
from pensieve_lab.schema_check.rounds import ending_bias
from pensieve_lab.schema_check.validation import LEAP_SECOND, problem_of
from tests.launching import Launch, load

check_schemas = load("check_schemas")
NUM_SCHEMAS = 12
LONG_TEXTS = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{70,75}$"},
    "minItems": 3,
    "maxItems": 3,
}


@pytest.fixture
def bench(tmp_path) -> Bench:
    """Return a repository with `NUM_SCHEMAS` schemas that compile, and one that does not."""
    schemas = {f"Long/{number}": {**LONG_TEXTS, "title": str(number)} for number in range(NUM_SCHEMAS)}
    schemas["Other/not"] = {"not": {"type": "null"}}
    for name, schema in schemas.items():
        path = tmp_path / "bench" / "data" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(schema), encoding="utf-8")
    git = ["git", "-C", str(tmp_path / "bench"), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "schemas"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return Bench.of(str(tmp_path / "bench"))


def tiny_grammars() -> Grammars:
    tokenizer = source_tokenizer("random:llama-tiny", 320)
    assert tokenizer is not None
    return Grammars(tokenizer, 320, [257, 261])


@pytest.mark.parametrize(
    ("schema", "text", "is_valid"),
    [
        ({"type": "integer"}, "1", True),
        ({"type": "integer"}, "1.5", False),
        ({"type": "integer"}, '{"', False),
        ({"multipleOf": 0.01}, "671759711441.18", True),
        ({"multipleOf": 0.01}, "671759711441.185", False),
        ({"multipleOf": 3}, "1e2", False),
        ({"multipleOf": 5}, "1e2", True),
        ({"multipleOf": 5}, '"no number"', True),
        ({"enum": [0.1, "a"]}, "0.10", True),
        ({"type": "string", "format": "ipv4"}, '"1.2.3.4"', True),
        ({"type": "string", "format": "ipv4"}, '"1.2.3.400"', False),
        # Siblings of a reference are ignored up to draft 7, and count in the default draft.
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "1", False),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/$defs/a",
                "minimum": 3,
                "$defs": {"a": {"type": "integer"}},
            },
            "1",
            True,
        ),
    ],
    ids=str,
)
def test_replies_are_judged(schema, text, is_valid):
    assert (problem_of(schema, text) is None) is is_valid


def test_only_a_second_60_is_a_known_difference(monkeypatch):
    """The validator knows this format only with another package, so the test brings its own check."""
    pattern = re.compile(r"\d{4}-(0\d|1[0-2])-\d\dT\d\d:[0-5]\d:[0-5]\d(\.\d+)?Z")
    checkers = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers
    monkeypatch.setitem(checkers, "date-time", (lambda text: pattern.fullmatch(text) is not None, ()))
    schema = {"items": {"format": "date-time"}}
    assert problem_of(schema, '["2020-01-02T03:04:05Z"]') is None
    assert problem_of(schema, '["2020-01-02T03:04:60.5Z"]') == LEAP_SECOND
    assert problem_of(schema, '["2020-01-02T03:60:05Z"]') not in (None, LEAP_SECOND)
    assert problem_of(schema, '["2020-01-02T03:04:60Z", "2020-13-02T03:04:05Z"]') not in (None, LEAP_SECOND)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {}}, "keywords not"),
        ({"if": {}, "then": {}}, "keywords if, then"),
        ({"format": "x", "type": "string"}, "unknown format"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf whose parts may overlap"),
        ({"title": "a" * 70_000}, "larger than 64 KiB"),
        (False, "unsatisfiable"),
    ],
    ids=str,
)
def test_refusals_have_reasons_without_the_schema(schema, reason):
    with pytest.raises(InvalidRequestError) as caught:
        tiny_grammars().compile(StructuredOutput.json_schema(schema))
    assert reason_of(caught.value) == reason


def test_schemas_are_drawn_from_all_files(bench):
    drawn = compiled_cases(tiny_grammars(), bench, seed=3, count=50)
    names = [f"Long/{number}.json" for number in range(NUM_SCHEMAS)]
    assert sorted(case.name for case in drawn.cases) == sorted(names)
    assert drawn.refused == {"keywords not": 1}
    assert drawn.sets == {
        "Long": {"drawn": NUM_SCHEMAS, "compiled": NUM_SCHEMAS},
        "Other": {"drawn": 1, "compiled": 0},
    }
    order = sorted([*names, "Other/not.json"])
    random.Random(3).shuffle(order)
    assert [case.name for case in drawn.cases] == [name for name in order if name != "Other/not.json"]


def test_a_file_that_a_partial_copy_lacks_is_counted(bench, tmp_path):
    blob = subprocess.check_output(
        ["git", "-C", bench.path, "rev-parse", "HEAD:data/Long/7.json"], text=True
    ).strip()
    (Path(bench.path) / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    drawn = compiled_cases(tiny_grammars(), bench, seed=0, count=50)
    assert len(drawn.cases) == NUM_SCHEMAS - 1
    assert drawn.refused == {"keywords not": 1, "file is not in the copy of the repository": 1}


def test_closing_tokens_are_favoured_and_white_space_is_not():
    tokenizer = source_tokenizer("random:llama-tiny", 320)
    assert tokenizer is not None
    bias = ending_bias(tokenizer, 5.0)
    assert {chr(token_id): value for token_id, value in bias.items() if value > 0} == dict.fromkeys(
        '"]}', 5.0
    )
    assert {chr(token_id) for token_id, value in bias.items() if value < 0} >= set(" \t\r\n")


def run_small(launch: Launch, bench: Bench, **flags: str) -> int:
    return launch(
        "check_schemas",
        shared_llm=False,
        bench=bench.path,
        models="random:llama-tiny",
        num_schemas=NUM_SCHEMAS,
        num_conversations=3,
        max_tokens="300",
        **{"num_parts": "1", **flags},
    )


def test_an_invalid_reply_and_an_event_that_never_happened_are_faults(launch, bench, capsys, monkeypatch):
    part = {
        "num_schemas": NUM_SCHEMAS,
        "replies": {"valid": 5, "invalid": 1, "cut": 1},
        "ended": {"suspended": 1, "fork": 0},
        "events": {"num_suspensions": 2, "num_restarts": 0},
        "problems": [{"schema": "a/b.json", "problem": "'x' is too long", "reply": '"x"'}],
        "failures": [],
        "outcomes": {"a/b.json": ["invalid 3", "cut 300"], "c.json": ["cut 300", "failed: E 0"]},
        "wall_s": 1.0,
        "processor_s": 1.0,
    }
    drawn = compiled_cases(tiny_grammars(), bench, seed=0, count=NUM_SCHEMAS)
    monkeypatch.setattr(check_schemas, "draw", lambda *_: drawn)
    monkeypatch.setattr(check_schemas, "check_part", lambda *_: part)
    assert run_small(launch, bench, num_parts="2") == 1
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    model = results["models"]["random:llama-tiny"]
    assert model["num_schemas"] == 2 * NUM_SCHEMAS and model["replies"] == {
        "cut": 2,
        "invalid": 2,
        "valid": 10,
    }
    assert model["num_schemas_with_end"] == 1
    assert set(results["faults"]) == {
        "random:llama-tiny: a/b.json: 'x' is too long",
        "random:llama-tiny: events: 0 num_restarts",
        "random:llama-tiny: ended: 0 fork",
    }


@pytest.mark.long
def test_replies_under_pressure_are_valid_and_parts_are_kept(launch, bench, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("pensieve_lab.schema_check.rounds.PAGES", (72, 40))
    parts_dir = str(tmp_path / "parts")
    status = run_small(launch, bench, parts_dir=parts_dir)
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, "\n".join(lines)
    results = json.loads(lines[-1])["results"]
    model = results["models"]["random:llama-tiny"]
    assert set(model["replies"]) == {"valid"} and model["replies"]["valid"] == 3 * NUM_SCHEMAS
    assert model["num_schemas"] == model["num_schemas_with_end"] == NUM_SCHEMAS
    assert min(*model["events"].values(), *model["ended"].values()) > 0
    assert results["faults"] == []

    monkeypatch.setattr("pensieve_lab.schema_check.rounds.Rounds.run", None)  # stored parts do not run
    assert run_small(launch, bench, parts_dir=parts_dir) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert again["models"] == results["models"]


@pytest.mark.long
def test_a_row_that_loses_its_mask_by_suspension_is_found(launch, bench, capsys, monkeypatch):
    monkeypatch.setattr("pensieve_lab.schema_check.rounds.PAGES", (72, 40))
    words = LateRows.words

    def forgetful(self, sampling, num_rows):
        for grant in sampling:
            if grant.request.num_suspensions:
                self.drop(grant.request)
        return words(self, sampling, num_rows)

    monkeypatch.setattr(LateRows, "words", forgetful)
    assert run_small(launch, bench) == 1
    faults = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["faults"]
    assert any("not JSON" in fault for fault in faults)
