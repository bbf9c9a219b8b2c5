"""The small parts of routes, by themselves: what is remembered for a while, pages of lists, and sampling."""

from __future__ import annotations

import pytest
from starlette.datastructures import QueryParams

from pensieve_jax.core.sampling_params import MAX_SEED
from pensieve_jax.server.api.pages import PageQuery, limit_of, page_object, page_query
from pensieve_jax.server.api.recent import Recent
from pensieve_jax.server.api.sampling import sampling_params
from pensieve_jax.server.http.body_budget import BodyBudget, HeldBody
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.settings import ServerSettings


def test_a_value_is_remembered_until_its_time_is_over():
    recent: Recent[str, int] = Recent(10.0, 5)
    recent.put("a", 1, 100.0)
    assert recent.get("a", 109.5) == 1 and recent.get("b", 100.0) is None
    assert recent.get("a", 110.0) is None
    recent.put("a", 2, 109.0)
    assert recent.get("a", 118.5) == 2 and len(recent) == 1, "its time began anew"
    recent.put("b", 3, 118.5)
    assert len(recent) == 2
    recent.put("c", 4, 119.0)
    assert len(recent) == 2 and recent.get("b", 119.0) == 3, "what is over takes no room"


def test_of_many_values_the_latest_are_remembered():
    recent: Recent[str, int] = Recent(1000.0, 3)
    for time_s, key in enumerate("abcad"):
        recent.put(key, time_s, float(time_s))
    assert [recent.get(key, 5.0) for key in "abcd"] == [3, None, 2, 4]


def test_a_value_that_was_replaced_is_not_dropped():
    recent: Recent[str, int] = Recent(10.0, 3)
    recent.put("a", 1, 0.0)
    recent.put("a", 2, 0.0)
    recent.drop("a", 1)
    recent.drop("b", 1)
    assert recent.get("a", 0.0) == 2
    recent.drop("a", 2)
    assert len(recent) == 0


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", PageQuery(None, 20, "desc")),
        ("limit=1&order=asc&after=x", PageQuery("x", 1, "asc")),
        ("limit=100&order=desc", PageQuery(None, 100, "desc")),
        ("limit=007", PageQuery(None, 7, "desc")),
    ],
)
def test_a_part_of_a_list_is_asked_for(query, found):
    assert page_query(QueryParams(query)) == found


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "limit=-1", "limit=", "limit=1.0", "limit=0000000020", "limit=²", "order=up"],
)
def test_a_part_that_cannot_be_is_refused(query):
    with pytest.raises(ApiError) as caught:
        page_query(QueryParams(query))
    assert (caught.value.status, caught.value.param) == (400, query.partition("=")[0])


def test_a_limit_has_nine_digits_at_most():
    assert limit_of(QueryParams("limit=999999999"), 1, 10**12) == 999_999_999
    with pytest.raises(ApiError):
        limit_of(QueryParams("limit=1000000000"), 1, 10**12)


@pytest.mark.parametrize(
    ("ids", "first", "last"), [([], "", ""), (["a"], "a", "a"), (["a", "b", "c"], "a", "c")]
)
@pytest.mark.parametrize("has_more", [True, False])
def test_a_list_names_its_ends(ids, first, last, has_more):
    data = [{"id": each} for each in ids]
    expected = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
    assert page_object(iter(data), has_more=has_more) == expected


@pytest.mark.parametrize(
    ("seed", "taken"), [(None, None), (0, 0), (MAX_SEED, MAX_SEED), (MAX_SEED + 1, 0), (-1, MAX_SEED)]
)
def test_any_seed_is_brought_into_range(seed, taken):
    assert sampling_params({}, max_tokens=3, seed=seed).seed == taken


def test_what_a_request_says_goes_before_the_models_defaults():
    defaults = {"temperature": 0.5, "top_k": 7}
    params = sampling_params(defaults, max_tokens=3, temperature=0.0, stop="x", min_tokens=None)
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.0, 7, ("x",), 3)
    assert sampling_params(defaults, max_tokens=3, stop=["x", "y"]).stop == ("x", "y")
    assert sampling_params(defaults, max_tokens=3).stop == ()


@pytest.mark.parametrize(("has_keys", "most"), [(True, 800), (False, 3200)])
def test_bodies_may_take_exactly_their_part(has_keys, most):
    """32 of the longest bodies fit; with keys, each of these has a quarter of that."""
    budget = BodyBudget(ServerSettings(max_body_bytes=100, api_keys_file="keys" if has_keys else None))
    with HeldBody(budget, "a") as held:
        held.take(most - 1)
        with pytest.raises(ApiError) as caught:
            held.take(2)
        assert caught.value.status == (429 if has_keys else 503)
        held.take(1)
        assert budget.num_bytes == most
    assert budget.num_bytes == 0 and not budget._by_owner


def test_all_keys_together_have_the_whole():
    budget = BodyBudget(ServerSettings(max_body_bytes=100, api_keys_file="keys"))
    for owner in "abcd":
        budget.take(owner, 800)
    with pytest.raises(ApiError) as caught:
        budget.take("e", 1)
    assert caught.value.status == 503 and budget.num_bytes == 3200
    budget.give_back("a", 800)
    budget.take("e", 800)
