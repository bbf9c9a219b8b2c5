"""The example of docs/adding_a_policy.md works as the page says."""

from __future__ import annotations

import re

import numpy as np

from pensieve_jax.cache.order import policies
from pensieve_jax.config import POLICIES
from tests.launching import ROOT


def test_the_order_of_the_page_orders_chunks():
    page = (ROOT / "docs" / "adding_a_policy.md").read_text("utf-8")
    example, row, names = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known = dict(vars(policies))
    exec(example, known)
    policy = known["PositionPolicy"]()
    candidates = policies.EvictionCandidates(np.array([3.0, 1.0]), np.zeros(2, np.int64), np.array([0, 4]))
    worths = policy.worths(candidates, 5.0)
    assert worths.tolist() == policies.EvictionPolicy.worths(policy, candidates, 5.0).tolist() == [0.5, 1.25]
    exec(names, known)
    assert known["POLICIES"] == (*POLICIES[:2], policy.name, *POLICIES[2:])
    assert eval("{" + row + "}", known) == {policy.name: known["PositionPolicy"]}
