"""The plan of a response: the turn that its request asks the engine for.

Owns: the conversion of a request's fields to a turn: its context, its parameters, and its stored record.
Does not know: how the turn runs, or how the request is answered. Called by `ResponseCreation`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import RESPONSES, SamplingParams, taken_fields
from pensieve_jax.core.structured import KINDS
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.errors import ApiError, ReplacedErrors, as_api_error, renamed_fields
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.context import RequestContext, request_context
from pensieve_jax.server.openai.responses.response import ResponseHead
from pensieve_jax.server.openai.responses.schemas import CreateResponse, echo_of
from pensieve_jax.server.turns.checks import check_num_tokens, context_token_limit
from pensieve_jax.server.turns.idempotency import key_record
from pensieve_jax.server.turns.sampling import sampling_params
from pensieve_jax.server.turns.stored import stored_draft
from pensieve_jax.server.turns.structured import AskedForm
from pensieve_jax.server.turns.tool_choice import ToolChoice, error_of_calls, form_fields, with_choice
from pensieve_jax.text.reply_forms import with_placed_form
from pensieve_jax.text.tools import Tool

ENGINE_FIELDS: Final[Mapping[str, str]] = {
    "prompt": "input",
    "messages": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}
"""This API's names of fields by the engine's names; those of forms are in `PlanErrors`."""


class PlanErrors(NamedTuple):
    """What an error of a response's turn is about.

    Attributes:
      fields: this API's names of fields by the engine's names.
      tools: the tools of the request.
      choice: which of them the reply may or must call.
    """

    fields: Mapping[str, str]
    tools: Sequence[Tool]
    choice: ToolChoice

    def as_api_error(self, error: BaseException) -> ApiError:
        """Return the error response for any exception."""
        if isinstance(error, InvalidRequestError):
            error = error_of_calls(error, self.fields, self.tools, self.choice)
        functions = {f"tools[{index}].function": f"tools[{index}]" for index in range(len(self.tools))}
        return as_api_error(error, {**self.fields, **functions})

    def renamed(self) -> ReplacedErrors:
        """Rename the fields of errors raised in the block to the client's names."""
        return ReplacedErrors(self.as_api_error)


def errors_of_job(spec: TurnSpec) -> PlanErrors:
    """Return the errors of a turn whose request is known by its turn only."""
    form = spec.params.structured
    at = "tools" if form is not None and (form.kind == "grammar" or form.frame) else "text.format"
    names = ("structured", *(f"structured.{part}" for part in (*KINDS, "frame")))
    return PlanErrors({**ENGINE_FIELDS, **dict.fromkeys(names, at)}, (), ToolChoice())


class ResponsePlan:
    """The plan of one response.

    Attributes:
      owner: the key owner of the response.
      body: the decoded request.
      body_sha256: SHA-256 digest of the raw body.
      key: its idempotency key, or None.
      context: the context before the reply.
      errors: what errors of its turn are about.
      resolved, head: the resolved context and the response head of the last call of `specs`.
      draft: the record to store, from the same call; None if the response is not stored.
    """

    def __init__(
        self,
        services: Services,
        owner: str,
        body: CreateResponse,
        asked: AskedForm,
        body_sha256: str,
        key: str | None,
    ) -> None:
        """Read the records that the request names; raise ApiError and UnknownRecordError."""
        self._services = services
        self._form = asked.form
        self._choice = body.choice()
        self.owner = owner
        self.body = body
        self.body_sha256 = body_sha256
        self.key = key
        self.context: RequestContext = request_context(
            services,
            owner,
            body,
            durable=body.stores,
            token_limit=context_token_limit(services),
            form=asked.form,
        )
        self.errors = PlanErrors(
            {**ENGINE_FIELDS, **form_fields(self._choice, asked)},
            self.context.tools,
            self._choice,
        )
        self.resolved: ResolvedContext | None = None
        self.head: ResponseHead | None = None
        self.draft: ResponseDraft | None = None
        self._created_at_s = services.now_s()
        # Drawn once per plan, so that a background response is the same when it runs again.
        self._seed = secrets.randbits(63) if body.seed is None else body.seed

    def prepared(self, memory: Memory) -> tuple[ResolvedContext, list[TurnSpec]]:
        """Return the context and its turn; see `RequestContext.find` for `memory`. It can take long."""
        resolved = self.context.find(memory)
        return resolved, self.specs(resolved)

    def specs(self, resolved: ResolvedContext) -> list[TurnSpec]:
        """Return the turn of a context with its stored record; raise ApiError for a too long context."""
        check_num_tokens(self._services, resolved.num_context_tokens, "input")
        params = self._params(resolved)
        turn_id = resolved.node.turn_id
        echo = echo_of(self.body, self._services.model_name, params.temperature, params.top_p)
        self.resolved = resolved
        self.head = ResponseHead(
            response_id=f"resp_{turn_id}",
            turn_id=turn_id,
            created_at_s=self._created_at_s,
            echo=echo,
            template_input=resolved.template_input,
        )
        self.draft = self._draft(self.head, turn_id) if self.body.stores else None
        return [resolved.spec(params, self.draft)]

    def _params(self, resolved: ResolvedContext) -> SamplingParams:
        body, services = self.body, self._services
        room = services.engine.info.limits.max_context_tokens - resolved.num_context_tokens
        given = {name: getattr(body, name) for name in taken_fields(RESPONSES)} | {"seed": self._seed}
        params = sampling_params(
            services.defaults,
            given,
            max_tokens=body.max_output_tokens or max(1, room),
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            structured=self._form,
        )
        template = resolved.template_input
        with renamed_fields({f"tools[{at}].function": f"tools[{at}]" for at in range(len(template.tools))}):
            params = with_choice(params, template, self._choice, services.chat_format)
        return with_placed_form(
            params, resolved.template_input, resolved.prompt_token_ids, services.tokenizer
        )

    def _draft(self, head: ResponseHead, turn_id: str) -> ResponseDraft:
        conversation = self.context.conversation
        return stored_draft(
            self.owner,
            turn_id,
            head.echo,
            self.context.new_items,
            self._created_at_s,
            body_sha256=self.body_sha256,
            conversation=None
            if conversation is None
            else (conversation.conversation_id, conversation.version),
            idempotency=key_record(self.key, self.body_sha256, self._created_at_s),
        )
