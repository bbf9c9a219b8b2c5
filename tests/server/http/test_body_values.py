"""Bodies of more values than a decoder reads in a short time are refused before they are decoded."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from pensieve_jax.server.http import bodies, body_values
from pensieve_jax.server.http.bodies import Body, decode_body
from pensieve_jax.server.http.body_values import MAX_NUMBERS, MAX_VALUES, num_charged_values
from pensieve_jax.server.http.errors import ApiError
from tests.seeds import new_seed

MEGABYTE = 1_000_000


class Anything(Body):
    x: Any = None


def filled(one: bytes, num_bytes: int = 9 * MEGABYTE) -> bytes:
    return b'{"x": [' + (one * (num_bytes // len(one)))[:-1] + b"]}"


@pytest.mark.parametrize(
    ("one", "what"),
    [
        (b"[],", "objects, lists and texts"),
        (b"{},", "objects, lists and texts"),
        (b'"ab",', "objects, lists and texts"),
        (b'"\\"\\\\",', "objects, lists and texts"),
        (b'{"a":1},', "objects, lists and texts"),
        (b"1,", "values"),
        (b"null,", "values"),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(monkeypatch, one, what):
    monkeypatch.setattr(bodies.msgspec.json, "decode", lambda body: pytest.fail("it was decoded"))
    with pytest.raises(ApiError) as caught:
        decode_body(filled(one), Anything)
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    limit = MAX_NUMBERS if what == "values" else MAX_VALUES
    assert f" {what}, but must have at most {limit:,}." in caught.value.message


@pytest.mark.parametrize("text", ["[]{},", '"', "\\", '\\"[', 'a "quote", a [list], a \\path\\', "\\\\\\"])
def test_what_stands_in_texts_does_not_count(text):
    value = {"x": [text * (3 * MEGABYTE // len(text))]}
    assert decode_body(json.dumps(value).encode(), Anything)[0].x == value["x"]


def test_a_million_ids_are_read():
    body = json.dumps({"x": [5] * (MAX_NUMBERS - 1)}).encode()
    assert len(decode_body(body, Anything)[0].x) == MAX_NUMBERS - 1


def num_values_of(value: Any) -> tuple[int, int]:
    """Return the number of objects, lists, texts and names of a value, and that of its commas."""
    inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    found = [num_values_of(one) for one in inner]
    own = isinstance(value, dict | list | str) + (len(value) if isinstance(value, dict) else 0)
    return own + sum(one for one, _ in found), max(len(inner) - 1, 0) + sum(one for _, one in found)


def test_a_body_is_charged_at_least_its_values():
    body = json.dumps({"prompt": "a", "zz": [[]] * 1000, "ids": [1] * 100_000}).encode()
    assert num_charged_values(body) == 1 + 3 + 1 + 1 + 1000 + 1 + (999 + 99_999 + 2) // 10
    assert num_charged_values(b'{"prompt": "[[[[,,,,,,,,,,"}') == 1 + 2 + 4 + 1


def test_a_long_text_of_marks_is_charged_for_what_it_is():
    """Code in a text must not seem to be values: the budget of a key would never admit it."""
    body = json.dumps({"prompt": json.dumps([{"a": 1}] * MAX_VALUES)}).encode()
    assert num_charged_values(body) == 3


def test_a_body_of_too_many_values_is_not_charged():
    with pytest.raises(ApiError, match="must have at most 250,000"):
        num_charged_values(filled(b"[],"))


def test_random_bodies_have_the_values_that_are_counted(monkeypatch):
    draw = random.Random(new_seed())

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth < 4 else 3)
        if kind < 2:
            return "".join(draw.choices('[]{},:"\\ aé\n', k=draw.randrange(9)))
        if kind == 2:
            return draw.choice([1, None, True, 1.5])
        if kind == 3:
            return {f'{at}"[': value(depth + 1) for at in range(draw.randrange(5))}
        return [value(depth + 1) for _ in range(draw.randrange(5))]

    monkeypatch.setattr(body_values, "_BLOCK_BYTES", draw.randrange(1, 60))
    for _ in range(300):
        given = json.loads(json.dumps(value(0)))
        body = msgspec.json.encode(given)
        (*_, found) = body_values.counted(body)
        assert found == num_values_of(given)
        assert num_charged_values(body) >= found.num_values + found.num_commas // 10


def test_a_body_of_too_many_values_is_counted_in_short_pieces_and_not_to_its_end(monkeypatch):
    lengths = []

    def noted(block, kind):
        lengths.append(len(block))
        return frombuffer(block, kind)

    frombuffer = body_values.np.frombuffer
    monkeypatch.setattr(body_values.np, "frombuffer", noted)
    with pytest.raises(ApiError):
        decode_body(filled(b"[],"), Anything)
    assert len(lengths) == 1 and lengths[0] <= 2**20 + 1
