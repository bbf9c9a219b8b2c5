"""Sampling parameters of turns, from requests and from models."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.sampling_params import (
    COMPLETIONS,
    MAX_SEED,
    RESPONSES,
    refused_fields,
    sampling_table,
    taken_fields,
)
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.openai.completions import CompletionBody
from pensieve_jax.server.openai.responses.schemas import CreateResponse
from pensieve_jax.server.openai.schemas import ChatBody
from pensieve_jax.server.turns.sampling import model_defaults, sampling_params
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
        ('{"temperature": null, "top_k": 50}', {"temperature": 1.0, "top_k": 50}),
    ],
)
def test_sampling_defaults_come_from_the_model(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert model_defaults(str(tmp_path)) == expected


@pytest.mark.parametrize("text", ["[", "[]", "3"])
def test_unreadable_defaults_are_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="generation_config"):
        model_defaults(str(tmp_path))


@pytest.mark.parametrize(
    ("route", "body"), [(COMPLETIONS, ChatBody), (COMPLETIONS, CompletionBody), (RESPONSES, CreateResponse)]
)
def test_a_route_declares_the_sampling_fields_of_the_table(route: str, body: type[Body]) -> None:
    """Each wire field is declared with its own type; the table defines which fields exist."""
    declared = set(body.__struct_fields__)
    assert set(taken_fields(route)) <= declared
    refused = refused_fields(route)
    assert not declared & refused.keys()
    assert {name: body.UNSUPPORTED[name] for name in refused} == refused


def test_the_page_names_every_sampling_field() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in sampling_table() if f"`{name}`" not in page] == []
