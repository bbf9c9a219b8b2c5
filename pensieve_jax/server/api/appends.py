"""Items that are appended to a conversation once, though their request may come twice.

Owns: under which ids a request's items are kept, and which requests their clients may not know the end of.
Does not know: how items are kept, or what they say.

Whoever repeats a request is answered with its items under the same ids, which are made of a name. The
history keeps that of a request with an idempotency key, with a digest of its body, so that what is deleted
later is not appended again. That of one without is remembered until it was answered, for a retry that says
that it is one (`x-stainless-retry-count`): the same items may well be sent twice on purpose.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from pensieve_jax.history.server_tables.changes import Idempotency
from pensieve_jax.server.api.recent import Recent
from pensieve_jax.server.api.repeats import kept_key

LIFETIME_S: Final = 600.0
MAX_UNANSWERED: Final = 10_000


class Append(NamedTuple):
    """One request.

    Attributes:
      name: what the ids of its items are made of.
      is_repeated: its items may be there already.
      kept: its key, to be kept with the items; None without one.
      request: what a retry of it is known by; None with a key.
    """

    name: str
    is_repeated: bool
    kept: Idempotency | None
    request: tuple[str, str, str] | None


class Appends:
    """The appends of one server. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self._unanswered = Recent[tuple[str, str, str], str](LIFETIME_S, MAX_UNANSWERED)

    def __len__(self) -> int:
        """How many were not answered, as far as that is remembered."""
        return len(self._unanswered)

    def begin(
        self,
        owner: str,
        conversation_id: str,
        key: str | None,
        body_sha256: str,
        *,
        is_retry: bool,
        now_s: float,
    ) -> Append:
        """A request to append came; call `answered` when its client knows."""
        kept = kept_key(key, body_sha256, now_s)
        if kept is not None:
            return Append(secrets.token_hex(24), True, kept, None)
        request = (owner, conversation_id, body_sha256)
        known = self._unanswered.get(request, now_s) if is_retry else None
        append = Append(known or secrets.token_hex(24), known is not None, None, request)
        self.missed(append, now_s)
        return append

    def answered(self, append: Append) -> None:
        """Its client knows that its items are there."""
        if append.request is not None:
            self._unanswered.drop(append.request, append.name)

    def missed(self, append: Append, now_s: float) -> None:
        """Its client may not know, and ask again."""
        if append.request is not None:
            self._unanswered.put(append.request, append.name, now_s)
