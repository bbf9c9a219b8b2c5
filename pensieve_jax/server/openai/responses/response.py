"""The response object of a running turn or of a stored response.

Owns: its fields, and how they describe the end of a turn.
Does not know: HTTP, streams, or where responses are stored.
Called by the other modules of `openai.responses`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pensieve_jax.core.outputs import Output, TokenLogprob, Usage
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.history.codec import unpack_logprobs
from pensieve_jax.history.server_tables.changes import ResponseDraft, ResponseRecord
from pensieve_jax.server.openai.responses.output import Item, output_items
from pensieve_jax.server.turns.sampling import num_cached_tokens, num_context_tokens, token_sources
from pensieve_jax.text.token_texts import TokenTexts

_ENDED_WITH_REPLY: Final = ("completed", "incomplete")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields of a response that are known from its start.

    Attributes:
      response_id: id of the response.
      turn_id: id of its turn, from which the ids of its output follow.
      created_at_s: creation time in seconds since the Unix epoch.
      echo: the request fields that it repeats.
      template_input: what its turn was rendered with, and how the reply is read.
    """

    response_id: str
    turn_id: str
    created_at_s: float
    echo: Mapping[str, Any]
    template_input: TemplateInput = NO_INPUT

    def object(
        self,
        status: str,
        *,
        output: Sequence[Item] = (),
        usage: Mapping[str, Any] | None = None,
        completed_at_s: float | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the response object with every field that OpenAI's and Open Responses' schemas require."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": int(self.created_at_s),
            "completed_at": None if completed_at_s is None else int(completed_at_s),
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "output": list(output),
            "usage": usage,
            **self.echo,
        }

    def ended(
        self,
        text: str,
        finish_reason: str,
        usage: Usage,
        completed_at_s: float,
        logprobs: Sequence[TokenLogprob] | None,
        texts: TokenTexts,
    ) -> dict[str, Any]:
        """Return the response object of a turn that ended with a reply."""
        status = status_of(finish_reason)
        return self.object(
            status,
            output=output_items(self.turn_id, self.template_input, text, status, logprobs, texts),
            usage=usage_object(usage),
            completed_at_s=completed_at_s,
        )

    def failed(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response object of a turn that failed."""
        return self.object("failed", error=error)


def head_of(draft: ResponseDraft | ResponseRecord, template_input: TemplateInput) -> ResponseHead:
    """Return the head of a running or stored response, whose turn was rendered with `template_input`."""
    return ResponseHead(
        response_id=draft.response_id,
        turn_id=draft.output_item_id.removeprefix("msg_"),
        created_at_s=draft.created_at_s,
        echo=json.loads(draft.request),
        template_input=template_input,
    )


def stored_response(record: ResponseRecord, texts: TokenTexts) -> dict[str, Any]:
    """Return the response object of a stored response; `texts` are those of the tokens it shows."""
    head = head_of(record, record.template_input)
    if record.status in _ENDED_WITH_REPLY:
        assert record.usage is not None and record.completed_at_s is not None
        usage = Usage(**json.loads(record.usage))
        return head.ended(
            record.output_text or "",
            record.finish_reason or "stop",
            usage,
            record.completed_at_s,
            stored_logprobs(record),
            texts,
        )
    error = None if record.error is None else json.loads(record.error)
    return head.object(record.status, error=error)


def stored_logprobs(record: ResponseRecord) -> tuple[TokenLogprob, ...] | None:
    """Return the log-probabilities of a stored reply, or None if they were not requested."""
    return None if record.logprobs is None else unpack_logprobs(record.logprobs)


def finished_response(
    head: ResponseHead, output: Output, completed_at_s: float, texts: TokenTexts
) -> dict[str, Any]:
    """Return the response object of a turn that has just ended."""
    return head.ended(output.text, output.finish_reason, output.usage, completed_at_s, output.logprobs, texts)


def status_of(finish_reason: str) -> str:
    """Return the status of a response whose turn ended with a reply."""
    return "completed" if finish_reason == "stop" else "incomplete"


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object, with the sources of the context tokens as `pensieve`."""
    num_input = num_context_tokens(usage)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": num_input + usage.output_tokens,
        "pensieve": token_sources([usage]),
    }
