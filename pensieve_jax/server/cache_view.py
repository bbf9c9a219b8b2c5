"""The HTTP endpoints under `/v1/pensieve/`, which show and control the KV cache of conversations.

Owns: the map of chunks and its stream; why chunks of a turn were dropped; copying a turn's KV cache out
or dropping it; the engine's counters.
Does not know: how the KV cache is stored, or which client draws it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError, UnknownTurnError
from pensieve_jax.core.turn_node import check_turn_id
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import ApiError, not_found
from pensieve_jax.server.http.replies import Events, HttpResponse, encode_json, event, json_reply
from pensieve_jax.server.http.request import HttpRequest

_PERIOD_S: Final = 0.25
"""Interval between two maps of a stream."""
_GLOBAL: Final = ("free_gpu_pages", "free_cpu_pages")
"""Values of a map that tell about all owners."""
_PREFIXES: Final = ("resp_", "chatcmpl-", "cmpl-")


class ResponseIdBody(Body):
    """Request body that names a response."""

    response_id: str


async def chunks(call: HttpRequest) -> HttpResponse:
    """GET /v1/pensieve/chunks: list the chunks of the caller's branches; `stream=true` sends every change."""
    if call.query.get("stream") == "true":
        return await _watched_maps(call)
    return json_reply(await _map(call))


async def _watched_maps(call: HttpRequest) -> Events:
    """Stream maps. The number of streams is limited, because each queries the engine four times a second.

    The first map is fetched before any byte is sent, so an engine error still becomes an HTTP status.
    """
    call.ticket.charge("maps", 1)
    first = await call.unless_gone(_map(call))
    return Events(_maps(call, first), call.services.settings.heartbeat_s)


async def _maps(call: HttpRequest, first: dict[str, Any]) -> AsyncGenerator[bytes]:
    """Yield the map whenever it has changed, at most four times a second, until the client disconnects."""
    sent, now = b"", encode_json(first)
    while True:
        if now != sent:
            sent = now
            yield event(now)
        await asyncio.sleep(_PERIOD_S)
        now = encode_json(await _map(call))


async def _map(call: HttpRequest) -> dict[str, Any]:
    engine = call.services.engine
    chunks: dict[str, Any] = await engine.call("chunk_map", call.owner)
    if not call.is_operator:  # the free pages change with every turn of others
        for name in _GLOBAL:
            chunks.pop(name, None)
    return chunks


async def push_out(call: HttpRequest) -> HttpResponse:
    """POST /v1/pensieve/push_out: copy a response's KV cache to host memory and free its pages."""
    return json_reply({"num_chunks": await _on_turn(call, "push_out_turn")})


async def forget_state(call: HttpRequest) -> HttpResponse:
    """POST /v1/pensieve/forget_state: drop a response's KV cache in every tier.

    The history is unaffected. A turn that is only in memory is lost with its KV cache.
    """
    await _on_turn(call, "forget_turn_state")
    return json_reply({})


async def explain(call: HttpRequest) -> HttpResponse:
    """GET /v1/pensieve/explain: report where a response's chunks are, and why others were dropped.

    The query parameter `response_id` names the response. Its chunks cover its context and its reply.
    """
    response_id = call.query.get("response_id")
    if not response_id:
        sentence = "response_id is missing; add ?response_id= with the id of a response or a completion."
        raise ApiError(400, "missing_required_parameter", sentence, param="response_id")
    explanation = await _of_turn(call, "explain_turn", response_id)
    # A long context has tens of thousands of chunks.
    return await call.run_long(_explained, response_id, explanation, call.services.now_s())


def _explained(response_id: str, explanation: dict[str, Any], now_s: float) -> HttpResponse:
    chunks = [
        {**chunk, "drop": None if (drop := chunk["drop"]) is None else _aged(drop, now_s)}
        for chunk in explanation["chunks"]
    ]
    found = {name: explanation[name] for name in ("num_tokens", "policy", "idle_s")}
    return json_reply({"response_id": response_id, **found, "chunks": chunks, "text": explanation["lines"]})


def _aged(drop: dict[str, Any], now_s: float) -> dict[str, Any]:
    return {**drop, "ago_s": round(max(0.0, now_s - drop["at_s"]), 3)}


async def _on_turn(call: HttpRequest, name: str) -> Any:
    return await _of_turn(call, name, (await call.decode(ResponseIdBody)).response_id)


async def _of_turn(call: HttpRequest, name: str, response_id: str) -> Any:
    """Call an engine method on a response's turn; raise ApiError 404 for an unknown response."""
    prefix = next((one for one in _PREFIXES if response_id.startswith(one)), "")
    turn_id = response_id.removeprefix(prefix)
    try:
        check_turn_id("response_id", turn_id)
        return await call.services.engine.call(name, call.owner, turn_id)
    except (InvalidRequestError, UnknownTurnError):
        raise not_found("response with state", response_id) from None


async def stats(call: HttpRequest) -> HttpResponse:
    """GET /v1/pensieve/stats: report the engine's counters since its start, and sizes of front-end tables.

    A key that is not an operator's gets the numbers of its owner.
    """
    engine, limits = call.services.engine, call.services.limits
    info = engine.info
    sizes = {name: getattr(info, name) for name in ("chunk_tokens", "chunk_bytes", "slot_bytes")}
    sizes["device"] = info.description.get("device")
    if not call.is_operator:
        counts = call.services.metrics.counts_of(call.owner)
        return json_reply({**counts, **sizes, "tables": {"turns_in_flight": limits.in_flight(call.owner)}})
    counters = await engine.call("stats")
    tables = {
        **{name: num_rows() for name, num_rows in call.services.tables.items()},
        "turns_in_engine": limits.num_in_engine,
        "turns_in_queue": limits.num_waiting,
        "owners_in_flight": limits.num_owners,
        "tasks": len(asyncio.all_tasks()),
    }
    return json_reply({**counters, **sizes, "tables": tables})


ROUTES: Final = (
    Route("GET", "/v1/pensieve/chunks", chunks),
    Route("GET", "/v1/pensieve/explain", explain),
    Route("POST", "/v1/pensieve/push_out", push_out),
    Route("POST", "/v1/pensieve/forget_state", forget_state),
    Route("GET", "/v1/pensieve/stats", stats),
)
