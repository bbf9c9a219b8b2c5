"""Which page of a list a request asks for, and the object that it gets."""

from __future__ import annotations

import pytest
from starlette.datastructures import QueryParams

from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.pagination import PageQuery, limit_of, page_object, page_query


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", PageQuery(None, 20, "desc")),
        ("limit=1&order=asc&after=x", PageQuery("x", 1, "asc")),
        ("limit=100&order=desc", PageQuery(None, 100, "desc")),
        ("limit=007", PageQuery(None, 7, "desc")),
    ],
)
def test_a_page_of_a_list_is_selected(query, found):
    assert page_query(QueryParams(query)) == found


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "limit=-1", "limit=", "limit=1.0", "limit=0000000020", "limit=²", "order=up"],
)
def test_an_invalid_page_is_refused(query):
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
def test_a_list_names_its_first_and_last_ids(ids, first, last, has_more):
    data = [{"id": each} for each in ids]
    expected = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
    assert page_object(iter(data), has_more=has_more) == expected
