"""The HTTP endpoint that lists what a key stores.

Owns: the amounts, their limits, and the oldest conversations and responses, which a client may delete.
Does not know: how amounts are counted, or how anything is deleted.
"""

from __future__ import annotations

from typing import Any, Final

from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.pagination import limit_of
from pensieve_jax.server.http.replies import HttpResponse, json_reply
from pensieve_jax.server.http.request import HttpRequest

_NUM_ROWS: Final = 100
_MAX_ROWS: Final = 1000


async def stored(call: HttpRequest) -> HttpResponse:
    """GET /v1/pensieve/stored: what the key stores, of how much, and the oldest of it.

    `limit`, the number of conversations and of responses, defaults to 100 and is at most 1,000.
    """
    limit = limit_of(call.query, _NUM_ROWS, _MAX_ROWS)
    return await call.run_long(_stored, call, limit)


def _stored(call: HttpRequest, limit: int) -> HttpResponse:
    history, quota = call.services.history, call.services.settings.storage_quota
    amounts = history.stored_by(call.owner)
    answer: dict[str, Any] = {
        "num_conversations": amounts.num_conversations,
        "num_responses": amounts.num_responses,
        "num_bytes": amounts.num_bytes,
        "limits": {
            "num_conversations": quota.conversations,
            "num_responses": quota.responses,
            "num_bytes": quota.bytes,
        },
        "conversations": [
            {"id": row[0], "created_at": int(row[1]), "last_active": row[2]}
            for row in history.oldest_conversations(call.owner, limit)
        ],
        "responses": [
            {"id": row[0], "created_at": int(row[1]), "status": row[2]}
            for row in history.oldest_responses(call.owner, limit)
        ],
    }
    return json_reply(answer)


ROUTES: Final = (Route("GET", "/v1/pensieve/stored", stored),)
