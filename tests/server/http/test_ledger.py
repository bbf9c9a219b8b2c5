"""The ledger: what owners may hold, and that it is released whatever becomes of their requests."""

from __future__ import annotations

import asyncio
import random

import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.ledger import RESOURCES, Budget, Ledger, budgets_of
from pensieve_jax.server.http.settings import ServerSettings
from tests.seeds import new_seed

SMALL = {name: Budget(100, 40, f"units of {name}") for name in RESOURCES}


@pytest.mark.parametrize(("has_keys", "most"), [(True, 40), (False, 100)])
def test_an_owner_may_hold_exactly_its_budget(has_keys, most):
    ledger = Ledger(SMALL, has_keys=has_keys)
    with ledger.ticket("a") as ticket, ledger.ticket("a") as other:
        ticket.charge("json_values", most - 1)
        with pytest.raises(ApiError, match=f"may have {most} units of json_values at a time") as caught:
            other.charge("json_values", 2)
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert caught.value.headers == {"retry-after": "1"}
        other.charge("json_values", 1)
        other.charge("jobs", most)
        assert ledger.held("json_values") == ledger.held("json_values", "a") == most
    assert all(ledger.held(name) == 0 for name in RESOURCES)


def test_all_keys_together_may_hold_the_total():
    ledger = Ledger(SMALL, has_keys=True)
    tickets = [ledger.ticket(owner) for owner in "abc"]
    tickets[0].charge("maps", 40)
    tickets[1].charge("maps", 40)
    with pytest.raises(ApiError, match="units of maps") as caught:
        tickets[2].charge("maps", 21)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert caught.value.headers == {"retry-after": "30"}
    tickets[0].close()
    tickets[2].charge("maps", 21)
    assert ledger.held("maps") == 61


@pytest.mark.parametrize(("has_keys", "most"), [(True, 40), (False, 100)])
def test_a_request_that_can_never_fit_is_refused_for_good(has_keys, most):
    """With a Retry-After the client would retry forever."""
    ledger = Ledger(SMALL, has_keys=has_keys)
    with ledger.ticket("a") as ticket, pytest.raises(ApiError, match=f"at most {most}") as caught:
        ticket.charge("encoded_characters", most + 1)
    assert (caught.value.status, caught.value.code, caught.value.headers) == (413, "request_too_large", {})
    assert ledger.held("encoded_characters") == 0


def test_a_ticket_releases_what_it_holds_once():
    ledger, releases = Ledger(SMALL, has_keys=True), []
    ticket = ledger.ticket("a")
    ticket.charge("jobs", 3)
    ticket.on_close(lambda: releases.append(ledger.held("jobs")))
    ticket.close()
    ticket.close()
    assert ledger.held("jobs") == 0 and releases == [0]
    with pytest.raises(AssertionError):
        ticket.charge("jobs", -1)


def test_budgets_come_from_the_settings():
    settings = ServerSettings(
        max_body_bytes=100, api_keys_file="keys", budgets={"maps": 9}, key_budgets={"maps": 3, "jobs": 7}
    )
    budgets = settings.resource_budgets()
    assert set(budgets) == set(RESOURCES)
    assert (budgets["maps"].total, budgets["maps"].of_key, budgets["jobs"].of_key) == (9, 3, 7)
    assert (budgets["body_bytes"].total, budgets["body_bytes"].of_key) == (3200, 640)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"budgets": {"map": 1}}, "budgets is 'map', but must be one of body_bytes, "),
        ({"budgets": {"maps": 0}}, "budgets.maps is 0, but must be at least 1"),
        ({"key_budgets": {"jobs": -1}}, "key_budgets.jobs is -1, but must be at least 1"),
        ({"key_budgets": {"jobs": 5}}, "key_budgets is 'jobs', but must be empty without keys"),
    ],
)
def test_a_wrong_budget_is_refused_by_name(settings, match):
    with pytest.raises(ConfigError, match=match):
        ServerSettings(**settings)


def test_every_resource_has_a_default_that_one_longest_body_fits_into():
    budgets = budgets_of({}, {}, max_body_bytes=10 * 2**20)
    assert list(budgets) == list(RESOURCES)
    assert all(1 <= budget.of_key <= budget.total for budget in budgets.values())
    assert budgets["encoded_characters"].of_key > 10 * 2**20


@pytest.mark.parametrize("round_", range(10))
def test_nothing_is_lost_over_random_lives_of_requests(round_):
    """Requests are charged, refused, fail or vanish in the middle; afterwards every counter is zero."""
    seed = new_seed()
    draw, ledger = random.Random(seed), Ledger(SMALL, has_keys=True)
    held: dict[tuple[str, str], int] = {}

    async def live(owner: str) -> None:
        with ledger.ticket(owner) as ticket:
            mine: dict[str, int] = {}
            try:
                for _ in range(draw.randint(0, 8)):
                    name, amount = draw.choice(RESOURCES), draw.randint(0, 15)
                    ticket.charge(name, amount)
                    mine[name] = mine.get(name, 0) + amount
                    held[owner, name] = held.get((owner, name), 0) + amount
                    assert held[owner, name] == ledger.held(name, owner) <= 40, seed
                    await asyncio.sleep(0)
            finally:
                for name, amount in mine.items():
                    held[owner, name] -= amount

    async def scenario() -> int:
        refused = 0
        for _ in range(20):
            tasks = [asyncio.ensure_future(live(draw.choice("abc"))) for _ in range(50)]
            for _ in range(3):
                await asyncio.sleep(0)
                draw.choice(tasks).cancel()  # the client vanishes
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [end for end in ends if isinstance(end, Exception) and not isinstance(end, ApiError)]
            assert not wrong, (seed, wrong)
            refused += sum(isinstance(end, ApiError) for end in ends)
            assert all(ledger.held(name) == 0 for name in RESOURCES), seed
        return refused

    assert asyncio.run(scenario()) > 0, seed
