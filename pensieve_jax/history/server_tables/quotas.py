"""Whether a change makes an owner store more than the owner may.

Owns: the comparison of stored amounts with a quota.
Does not know: how amounts are counted (`stored_amounts`), or who sets quotas.
"""

from __future__ import annotations

from pensieve_jax.core.errors import StorageQuotaError
from pensieve_jax.history.server_tables.changes import StorageQuota
from pensieve_jax.history.stored_amounts import StoredAmounts


def check_growth(before: StoredAmounts, after: StoredAmounts, quota: StorageQuota) -> None:
    """Raise StorageQuotaError if an amount has grown to more than its quota."""
    for name, was, now, limit in _compared(before, after, quota):
        if limit is not None and now > max(was, limit):
            raise StorageQuotaError(name, was, limit)


def check_room(stored: StoredAmounts, quota: StorageQuota) -> None:
    """Raise StorageQuotaError unless there is room for another response."""
    for name, amount, _, limit in _compared(stored, stored, quota):
        if name != "conversations" and limit is not None and amount >= limit:
            raise StorageQuotaError(name, amount, limit)


def _compared(
    before: StoredAmounts, after: StoredAmounts, quota: StorageQuota
) -> tuple[tuple[str, int, int, int | None], ...]:
    """Return the name, both amounts and the quota of each kind."""
    return (
        ("conversations", before.num_conversations, after.num_conversations, quota.conversations),
        ("responses", before.num_responses, after.num_responses, quota.responses),
        ("bytes", before.num_bytes, after.num_bytes, quota.bytes),
    )
