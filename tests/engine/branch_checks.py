"""Invariants of the branches in memory between any two calls; tests check them after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.live import Branch


def check_branches(table: ConversationTable, tokens: Mapping[str, Sequence[int]]) -> None:
    """Assert that every branch has the tokens of its turns, and is found by each of them and by its chunks.

    `tokens` are those of the context up to and including each turn that was answered.
    """
    branches = table.branches
    live = [live for live in table._live.values() if isinstance(live, Branch)]
    for branch in live:
        committed = branch.conversation.committed_token_ids
        for turn_id in branch.path:
            assert tuple(branch.context_of(turn_id)) == tuple(tokens[turn_id]), f"{turn_id} has other tokens"
            assert branch in branches._by_turn[branch.owner, turn_id]
            beginning, context = branch.path_to(turn_id), tokens[turn_id]
            for name, (num_shared, _, tail) in beginning.items():
                assert (*context[:num_shared], *tail) == tuple(tokens[name]), (
                    f"{name} on the path to {turn_id}"
                )
        assert committed == (branch.context_of(branch.tip) if branch.path else [])
        assert not branch.conversation.replaced or branch.busy
        assert len(branch.hashes) <= len(branch.known_tokens) // table._cache.chunk_tokens
        assert branch.conversation.num_turns == len(branch.path)
        assert branch in branches._by_owner[branch.owner]
        for known_hash in branch.hashes:
            who = branches._chunks._by_hash[known_hash]
            assert branch is who or branch in who, "an entry of the index is not the branch's"
    assert {branch for found in branches._by_turn.values() for branch in found} <= set(live)
    assert {branch for found in branches._by_owner.values() for branch in found} == set(live)
    for who in branches._chunks._by_hash.values():
        assert set(who if isinstance(who, dict) else [who]) <= set(live), "an entry outlived its branch"
