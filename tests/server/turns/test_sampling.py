"""Sampling parameters of turns, from requests and from models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.sampling_params import (
    COMPLETIONS,
    MAX_SEED,
    MESSAGES,
    RESPONSES,
    refused_fields,
    sampling_table,
    taken_fields,
)
from pensieve_jax.server.anthropic.schemas import MessagesBody
from pensieve_jax.server.http.bodies import Body, decode_body
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.openai.completions import CompletionBody
from pensieve_jax.server.openai.responses.schemas import CreateResponse, TextConfig
from pensieve_jax.server.openai.schemas import ChatBody, ChatMessage
from pensieve_jax.server.turns.sampling import (
    MISSPELLED,
    UNSUPPORTED_SAMPLING,
    UNSUPPORTED_TEMPLATE,
    StreamOptions,
    model_defaults,
    sampling_params,
)
from tests.launching import ROOT


@pytest.mark.parametrize(
    ("seed", "taken"), [(None, None), (0, 0), (MAX_SEED, MAX_SEED), (MAX_SEED + 1, 0), (-1, MAX_SEED)]
)
def test_any_seed_is_mapped_into_range(seed, taken):
    assert sampling_params({}, {"seed": seed}, max_tokens=3).seed == taken


def test_a_request_overrides_the_models_defaults():
    defaults = {"temperature": 0.5, "top_k": 7}
    params = sampling_params(defaults, {"temperature": 0.0, "stop": "x", "min_tokens": None}, max_tokens=3)
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.0, 7, ("x",), 3)
    assert sampling_params(defaults, {"stop": ["x", "y"]}, max_tokens=3).stop == ("x", "y")
    assert sampling_params(defaults, {}, max_tokens=3).stop == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {"temperature": 1.0}),
        ("{}", {"temperature": 1.0}),
        ('{"temperature": 0.6, "top_p": 0.9, "do_sample": true}', {"temperature": 0.6, "top_p": 0.9}),
        ('{"do_sample": false}', {"temperature": 0.0}),
        ('{"do_sample": false, "temperature": 0.9, "top_p": 0.6}', {"temperature": 0.0, "top_p": 0.6}),
        ('{"do_sample": null, "temperature": 0.9}', {"temperature": 0.9}),
        ('{"temperature": null, "top_k": 50}', {"temperature": 1.0, "top_k": 50}),
        ('{"top_k": -1}', {"temperature": 1.0, "top_k": 0}),
        (
            '{"repetition_penalty": 1.05, "min_p": 0.1}',
            {"temperature": 1.0, "repetition_penalty": 1.05, "min_p": 0.1},
        ),
        ('{"top_p": 0.0}', {"temperature": 1.0, "top_p": 1.0}),
    ],
)
def test_sampling_defaults_come_from_the_model(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert model_defaults(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_beams": 1, "typical_p": 1.0, "stop_strings": None}, ""),
        ({"suppress_tokens": [], "no_repeat_ngram_size": 0, "pad_token_id": 0}, ""),
        ({"no_repeat_ngram_size": 3, "suppress_tokens": [7]}, "no_repeat_ngram_size=3, suppress_tokens=[7]"),
        ({"max_new_tokens": 512, "max_length": 4096}, "max_length=4096, max_new_tokens=512"),
    ],
)
def test_defaults_that_are_not_applied_are_named(tmp_path, caplog, values, named):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(values))
    assert model_defaults(str(tmp_path)) == {"temperature": 1.0}
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ([f"{path} sets {named}, which this server does not apply"] if named else [])


def test_penalties_of_the_model_are_left_out_where_the_engine_has_none(tmp_path, caplog):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"repetition_penalty": 1.05, "min_p": 0.1}))
    assert model_defaults(str(tmp_path), penalties=False) == {"temperature": 1.0, "min_p": 0.1}
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage() == f"{path} sets repetition_penalty=1.05, which this server does not apply"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "0.7"}, "temperature is '0.7', but must be a finite number"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 1.5}, "top_p is 1.5, but must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be a number above 0, up to 10"),
        ({"do_sample": "false"}, "do_sample is 'false', but must be true, false or null"),
    ],
)
def test_invalid_defaults_are_named_with_their_file(tmp_path, values, words):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"generation_config.json: {words}"):
        model_defaults(str(tmp_path))


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, CreateResponse, MessagesBody])
def test_every_route_takes_the_other_ways_to_switch_a_cut_off(body: type[Body]) -> None:
    request = REQUESTS[body] | {"top_k": -1, "top_p": 0}
    decoded, _ = decode_body(json.dumps(request).encode(), body)
    given = {name: getattr(decoded, name) for name in ("top_k", "top_p")}
    params = sampling_params({"top_k": 5, "top_p": 0.5}, given, max_tokens=3)
    assert (params.top_k, params.top_p) == (0, 1.0)


@pytest.mark.parametrize("text", ["[", "[]", "3"])
def test_unreadable_defaults_are_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="generation_config"):
        model_defaults(str(tmp_path))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, ChatBody),
        (COMPLETIONS, CompletionBody),
        (RESPONSES, CreateResponse),
        (MESSAGES, MessagesBody),
    ],
)
def test_a_route_declares_the_sampling_fields_of_the_table(route: str, body: type[Body]) -> None:
    """Each wire field is declared with its own type; the table defines which fields exist."""
    declared = set(body.__struct_fields__)
    assert set(taken_fields(route)) <= declared
    refused = refused_fields(route)
    refused_too = (body.UNSUPPORTED.keys() & declared) - OF_ONE_ROUTE.get(body, set())
    assert not refused_too, "a declared field is taken, so nothing would refuse it"
    assert not declared & (body.IGNORED | body.MISPLACED.keys())
    assert {name: body.UNSUPPORTED[name] for name in refused} == refused


REQUESTS: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"prompt": "x"},
    CreateResponse: {"input": "x"},
    MessagesBody: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
# Fields that one route has in a form of its own, and that the others refuse.
OF_ONE_ROUTE: dict[type[Body], set[str]] = {MessagesBody: {"thinking"}}


def values_of(name: str) -> list[Any]:
    """JSON values that ask for an effect of a field; a route that has the field accepts some of them."""
    taken = UNSUPPORTED.get(name, ())
    return [value for value in (2, 0.5, True, "x", ["x"], [7], {"x": 1}) if value not in taken]


UNSUPPORTED = UNSUPPORTED_SAMPLING | UNSUPPORTED_TEMPLATE


@pytest.mark.parametrize("name", sorted({*sampling_table(), *UNSUPPORTED}))
def test_no_route_ignores_a_sampling_field_that_another_takes_or_refuses(name: str) -> None:
    refusals = set()
    bodies = {body for body in REQUESTS if name not in OF_ONE_ROUTE.get(body, ())}
    for body in bodies:
        request = REQUESTS[body]
        for value in values_of(name):
            try:
                _, ignored = decode_body(json.dumps(request | {name: value}).encode(), body)
            except ApiError as error:
                assert (error.status, (error.param or "").partition("[")[0]) == (400, name)
                refusals.add((body, error.code, error.message))
            else:
                assert ignored == ()
    if name in UNSUPPORTED:
        assert {body for body, _, _ in refusals} == bodies
        assert {code for _, code, _ in refusals} == {"unsupported_parameter"}
        assert len({message for _, _, message in refusals}) == 1, "each route refuses with the same words"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_every_route_takes_the_values_that_ask_for_the_default(name: str) -> None:
    for body, request in REQUESTS.items():
        for value in (None, *UNSUPPORTED[name]):
            _, ignored = decode_body(json.dumps(request | {name: value}).encode(), body)
            assert ignored == ()


# Values of vLLM's and OpenAI's clients that once had no effect, and only a header said so.
ASKED: dict[str, Any] = {
    "regex": "a+",
    "ebnf": "root ::= x",
    "skip_special_tokens": False,
    "return_tokens_as_token_ids": True,
    "thinking_token_budget": 10,
    "priority": 1,
    "cache_salt": "s",
    "vllm_xargs": {"a": 1},
    "enable_thinking": True,
    "structural_tag": "{}",
    "guided_decoding_backend": "outlines",
    "guided_whitespace_pattern": " ",
    "suffix": "x",
    "best_of": 2,
}


@pytest.mark.parametrize("name", ASKED)
def test_a_setting_whose_absence_would_change_the_answer_is_refused(name: str) -> None:
    for body, request in REQUESTS.items():
        with pytest.raises(ApiError) as caught:
            decode_body(json.dumps(request | {name: ASKED[name]}).encode(), body)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize("name", MISSPELLED)
@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_a_name_of_another_server_is_refused_with_the_name_here(body: type[Body], name: str) -> None:
    with pytest.raises(ApiError, match=f"Use {MISSPELLED[name]}") as caught:
        decode_body(json.dumps(REQUESTS[body] | {name: [2]}).encode(), body)
    assert caught.value.param == name


def test_the_page_names_every_refused_field() -> None:
    page = (ROOT / "docs" / "api_reference.md").read_text(encoding="utf-8")
    bodies = (ChatBody, CompletionBody, CreateResponse, ChatMessage, StreamOptions, TextConfig)
    names = {name for body in bodies for name in body.UNSUPPORTED} | MISSPELLED.keys()
    assert [name for name in sorted(names) if f"`{name}`" not in page and f".{name}`" not in page] == []
    page += (ROOT / "docs" / "anthropic.md").read_text(encoding="utf-8")
    names = MessagesBody.UNSUPPORTED.keys()
    assert [name for name in sorted(names) if f"`{name}`" not in page and f".{name}`" not in page] == []


def test_the_page_names_every_sampling_field() -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "sampling.md")]
    assert [name for name in sampling_table() if f"`{name}`" not in "".join(pages)] == []
