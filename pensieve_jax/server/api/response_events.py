"""The events of a streamed response, in the order that clients rely on.

Owns: which events there are, their order, numbers and fields, and how each is written.
Does not know: where deltas come from, or whether anybody listens.

The order: created, (queued), in_progress, output_item.added, content_part.added, deltas, output_text.done,
content_part.done, output_item.done, completed or incomplete. Numbers count from 0 without a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pensieve_jax.server.api.response_object import ResponseHead
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.replies import encode_json, event
from pensieve_jax.server.turns.items import output_part


class ResponseEvents:
    """Writes the events of one response. Those up to `starting_after` are counted, but come out as b""."""

    def __init__(self, head: ResponseHead, starting_after: int = -1) -> None:
        """Nothing is written yet."""
        self._head = head
        self._starting_after = starting_after
        self._last_number = -1
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of the reply that there were events of."""
        return "".join(self._texts)

    def begin(self, *, background: bool) -> list[bytes]:
        """Everything before the first delta."""
        head = self._head
        events = [self._lifecycle("response.created", "queued" if background else "in_progress")]
        if background:
            events.append(self._lifecycle("response.queued", "queued"))
        events.append(self._lifecycle("response.in_progress", "in_progress"))
        item = head.item("in_progress")
        events.append(self._write("response.output_item.added", {"output_index": 0, "item": item}))
        part = {**self._place(), "part": output_part("")}
        events.append(self._write("response.content_part.added", part))
        return events

    def delta(self, text: str, logprobs: Sequence[Any] = ()) -> bytes:
        """A piece of the reply."""
        self._texts.append(text)
        fields = {**self._place(), "delta": text, "logprobs": list(logprobs)}
        return self._write("response.output_text.delta", fields)

    def end(self, response: Mapping[str, Any]) -> list[bytes]:
        """Everything behind the last delta, of the response object with its reply."""
        (item,) = response["output"]
        (part,) = item["content"]
        done = {**self._place(), "text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._write("response.output_text.done", done),
            self._write("response.content_part.done", {**self._place(), "part": part}),
            self._write("response.output_item.done", {"output_index": 0, "item": item}),
            self._write(f"response.{response['status']}", {"response": response}),
        ]

    def failure(self, error: ApiError) -> list[bytes]:
        """What comes behind the last delta of a response that failed."""
        response = self._head.failed(failure_object(error))
        return [self.interruption(error), self._write("response.failed", {"response": response})]

    def interruption(self, error: ApiError) -> bytes:
        """Why a stream ends before its response, which goes on."""
        return self._write("error", {"code": error.code, "message": error.message, "param": error.param})

    def cancelled(self) -> list[bytes]:
        """What comes behind the last delta of a response that was cancelled; OpenAI has no event of it."""
        response = self._head.object("cancelled")
        return [self._write("response.incomplete", {"response": response})]

    # Inside

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._head.item_id, "output_index": 0, "content_index": 0}

    def _lifecycle(self, kind: str, status: str) -> bytes:
        return self._write(kind, {"response": self._head.object(status)})

    def _write(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._last_number += 1
        if self._last_number <= self._starting_after:
            return b""
        return event(encode_json({"type": kind, "sequence_number": self._last_number, **fields}), kind)


def failure_object(error: ApiError) -> dict[str, Any]:
    """What a failed response says of its error; the codes are a list of OpenAI's."""
    code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
    return {"code": code, "message": error.message}
