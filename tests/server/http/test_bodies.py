"""Errors of JSON bodies that hold what UTF-8 cannot encode (lone surrogates of UTF-16), and of fields."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pensieve_jax.server.http.bodies import MAX_IGNORED, MAX_ITEMS, Body, decode_body, lone_surrogate
from pensieve_jax.server.http.errors import ApiError, unsupported
from pensieve_jax.server.http.middleware import _REQUEST_ID


class Part(Body):
    text: str = ""


class Whole(Body):
    parts: list[Part] = []  # noqa: RUF012 - a struct copies it
    name: str = ""


def error_of(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_body(body, Whole)
    assert caught.value.status == 400
    caught.value.message.encode()
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"name": "\ud800"}', "name"),
        (rb'{"name": "a\uDC00"}', "name"),
        (rb'{"name": "\ud800\u0041"}', "name"),
        (rb'{"name": "\ude00\ud83d"}', "name"),
        (rb'{"parts": [{"text": "\ud83d\ude00"}, {"text": "b\udfffc"}]}', "parts[1].text"),
        (rb'{"parts": [{"text": "\ud800"}], "name": "\ud800"}', "parts[0].text"),
        (rb'{"unknown": {"x": ["\ud800"]}}', "unknown.x[0]"),
        (rb'{"unknown": {"\ud800": 1}}', "unknown"),
        (rb'{"\ud800": 1}', None),
        (rb'"\ud800"', None),
        (b'{"%b": "\\ud800"}' % (b"x" * 10_000), None),
    ],
)
def test_a_lone_surrogate_is_named_with_its_field(body, param):
    error = error_of(body)
    assert (error.code, error.param) == ("invalid_value", param)
    assert "lone surrogate" in error.message and (param or "The body") in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        rb'{"name": "\ud800',
        rb'{"name": "\ud800", }',
        rb'{"name": "\ud8"}',
        b'{"name": "\xed\xa0\x80"}',
        b'{"name": "\xff\\ud800"}',
        b'{"name": "\\ud800", "many": ' + b"[" * 60_000,  # in longer bodies only the surrogate is reported
        rb'{"name": "\ud800", "many": ' + b"1" * 5_000 + b"}",
    ],
    ids=lambda body: str(body[:30]),
)
def test_invalid_json_is_reported_as_such(body):
    error = error_of(body)
    assert (error.code, error.param) == ("invalid_json", None)


def test_surrogates_in_pairs_and_escaped_backslashes_are_text():
    value, _ = decode_body(rb'{"name": "\ud83d\ude00 \\ud800"}', Whole)
    assert value.name == "\U0001f600 \\ud800"


@pytest.mark.parametrize(
    ("body", "is_lone"),
    [
        (rb'["\ud83d\ude00", NaN]', False),
        (rb'["\\ud800", NaN]', False),
        (rb'["\n\u0041\\", "\ud83d\ude00"', False),
        (rb'["\ude00\ud83d"]', True),
        (rb'["\ud83d\ud83d\ude00"]', True),
        (rb'["\\\ud800"]', True),
    ],
)
def test_only_a_lone_surrogate_is_detected(body, is_lone):
    """Pairs are whole characters, and an escaped backslash escapes nothing."""
    assert (lone_surrogate(body) is not None) == is_lone


def test_in_a_long_body_the_field_is_not_searched():
    """The search takes a second for 10 MiB, for which other requests would wait."""
    error = lone_surrogate(b"[" + b"0," * 2**16 + rb'"\ud800"]')
    assert error is not None and error.message.startswith("The body must be text that UTF-8 can hold")


class Limited(Body):
    UNSUPPORTED: ClassVar = {"off": (False,), "one": (1,)}
    MISPLACED: ClassVar = {"elsewhere": "on another route"}
    IGNORED: ClassVar = frozenset({"label"})
    name: str = ""


@pytest.mark.parametrize("body", [rb'{"off": 0}', rb'{"off": true}', rb'{"one": true}', rb'{"one": 2}'])
def test_a_number_is_not_accepted_as_a_boolean_in_an_unsupported_field(body):
    with pytest.raises(ApiError) as caught:
        decode_body(body, Limited)
    assert (caught.value.status, caught.value.param) == (400, "off" if b"off" in body else "one")


@pytest.mark.parametrize("value", [b"0", b"1", b"true", b'"x"', b"[0]"])
def test_a_misplaced_field_with_an_effective_value_is_refused(value):
    with pytest.raises(ApiError, match="on another route") as caught:
        decode_body(b'{"elsewhere": %b}' % value, Limited)
    assert caught.value.param == "elsewhere"


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        (rb'{"off": false, "one": 1}', ()),
        (rb'{"off": null, "one": null}', ()),
        (rb'{"one": 1.0, "label": 3}', ()),
        (rb'{"elsewhere": false}', ("elsewhere",)),
        (rb'{"elsewhere": {}, "other": 0}', ("elsewhere", "other")),
    ],
)
def test_values_without_effect_are_accepted(body, ignored):
    assert decode_body(body, Limited) == (Limited(), ignored)


@pytest.mark.parametrize("num_names", [MAX_IGNORED, MAX_IGNORED + 1])
def test_ignored_names_are_listed_up_to_the_size_of_a_header(num_names):
    body = b"{%b}" % b",".join(b'"x%d": 1' % number for number in range(num_names))
    _, ignored = decode_body(body, Limited)
    assert ignored == tuple(f"x{number}" for number in range(MAX_IGNORED))


class Texts(Body):
    texts: list[str] = []  # noqa: RUF012 - a struct copies it


def test_lists_of_texts_have_no_limit():
    whole, _ = decode_body(b'{"texts": [%b]}' % b",".join([b'""'] * (MAX_ITEMS + 1)), Texts)
    assert len(whole.texts) == MAX_ITEMS + 1


def test_lists_of_objects_have_a_limit():
    part = b'{"text": ""}'
    body = b'{"parts": [%b]}'
    whole, _ = decode_body(body % b",".join([part] * MAX_ITEMS), Whole)
    assert len(whole.parts) == MAX_ITEMS
    with pytest.raises(ApiError, match=r"parts has 4097 items, but must have at most 4096") as caught:
        decode_body(body % b",".join([part] * (MAX_ITEMS + 1)), Whole)
    assert caught.value.param == "parts"


@pytest.mark.parametrize(
    ("why", "accepted", "message"),
    [
        ("", (), "x is not supported by this server; leave it out."),
        ("", (False, ""), "x is not supported by this server; leave it out."),
        (
            "too new",
            ("a", 1, "b"),
            'x is not supported by this server: too new; leave it out, or set it to "a" or "b".',
        ),
    ],
)
def test_an_unsupported_field_is_refused_with_its_accepted_values(why, accepted, message):
    error = unsupported("x", why, accepted)
    assert (error.message, error.param, error.status) == (message, "x", 400)


@pytest.mark.parametrize(("length", "is_accepted"), [(0, False), (1, True), (128, True), (129, False)])
def test_the_id_of_a_request_has_at_most_128_characters(length, is_accepted):
    assert (_REQUEST_ID.match("a" * length) is not None) == is_accepted
