"""The turns of a request that sends all messages of its conversation, for every API with such requests.

Owns: their admission, the turn that they continue from, what is stored with them, and their usage.
Does not know: request schemas, or how a reply is written. Called by the handlers of `server.openai`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pensieve_jax.core.errors import ChatTemplateError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.server.async_engine import AsyncTurn
from pensieve_jax.server.context.resolver import Memory, ResolvedContext, has_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.turns.checks import (
    check_num_tokens,
    commit_context,
    context_token_limit,
    template_error,
)
from pensieve_jax.server.turns.idempotency import KeyedRequest, StoredReply
from pensieve_jax.server.turns.items import items_of
from pensieve_jax.server.turns.repeated import RepeatedTurn, RepeatedTurns
from pensieve_jax.server.turns.run import ReplyTurns, run_turns, start_turns
from pensieve_jax.server.turns.sampling import completion_usage
from pensieve_jax.server.turns.stored import completion_echo, stored_draft
from pensieve_jax.server.workers import SOME_WORK, WorkEstimate
from pensieve_jax.text import Message
from pensieve_jax.text.messages import num_characters
from pensieve_jax.text.replies import ReplyParts, added_parts
from pensieve_jax.text.reply_forms import with_placed_form
from pensieve_jax.text.tools import num_tool_characters

type ParamsOf = Callable[[int], Sequence[SamplingParams]]
"""Returns the parameters of each reply, given the number of tokens that the context leaves for it."""


class MessageTurns:
    """The turns of one request: one for each reply, as siblings after the same messages.

    Attributes:
      created_at_s: when the request came, or the earlier one with its key, in seconds since the Unix epoch.
      contexts: one for each reply, once `start` has found what the messages continue from.
      template_input: what the template gets beside the messages.
    """

    def __init__(
        self,
        call: HttpRequest,
        messages: Sequence[Message],
        template_input: TemplateInput = NO_INPUT,
        *,
        num_replies: int = 1,
        store: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        paths: Sequence[str] | None = None,
        is_new: bool = False,
        keyed: KeyedRequest | None = None,
    ) -> None:
        """Prepare the turns of a request.

        Args:
          call: the request.
          messages: the whole context, of well-formed messages.
          template_input: what the template gets beside them.
          num_replies: number of replies to the messages.
          store: whether the turns are stored in the history; None does what the server's settings say.
          metadata: what is stored with them.
          is_new: whether the whole context is computed as the prompt of a new tree, whatever it could
            continue from.
          keyed: the key of the request, if it has one.
          paths: the paths of the messages in the request, for errors; None: `messages[0]` and so on.
        """
        self.contexts: list[ResolvedContext] = []
        self._services = call.services
        self._notes = call.notes
        self._wait = call.unless_gone
        self._owner = call.owner
        self._messages = messages
        self._num_characters = num_characters(messages) + num_tool_characters(template_input.tools)
        # Its other fields count as well: sampling options can have a million ids.
        self._estimate = WorkEstimate.of(max(self._num_characters, len(call.body)), len(messages))
        self.template_input = template_input
        self._num_replies = num_replies
        self._metadata = metadata
        self._paths = paths
        self._is_new = is_new
        self._is_durable = stores_turns(call.services, store)
        self._keyed = keyed
        earlier = keyed.earlier if keyed is not None else None
        self._earlier = earlier
        self.created_at_s = call.services.now_s() if earlier is None else earlier.record.created_at_s

    async def start(self, params_of: ParamsOf, *, max_tokens: int | None) -> ReplyTurns:
        """Wait for a ticket and submit the turns; raise ApiError, and StorageQuotaError if they are stored.

        The turn of an earlier request with the same key is returned instead, if there was one.

        Args:
          params_of: see `ParamsOf`.
          max_tokens: limit of each reply if the client gave one.
        """

        if self._earlier is not None:
            return await self._services.run_cpu(
                self._owner, SOME_WORK, self._repeated, self._earlier, params_of
            )

        async def start() -> Sequence[AsyncTurn]:
            _, turns = await start_turns(
                self._services.engine, self._find, partial(self._specs, params_of), run_cpu=self._run_cpu
            )
            return turns

        if self._is_durable:
            await self._services.storage.check(self._owner)
        return await run_turns(
            self._services,
            self._owner,
            start,
            num_turns=self._num_replies,
            num_tokens=self._num_characters // 4,
            max_tokens=max_tokens,
            num_shared=self._num_replies,
            wait=self._wait,
        )

    async def record_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Add the finished turns to the index, and return their usage as `completion_usage` does."""
        if self._earlier is not None:  # it was recorded when the turn ran
            return completion_usage([output.usage for output in outputs], len(outputs))
        for context, output in zip(self.contexts, outputs, strict=True):
            if output.prompt_logprobs is not None and not context.node.durable:
                continue  # the engine has forgotten it
            await commit_context(self._services, context, output)
        usage = completion_usage([output.usage for output in outputs], len(outputs))
        self._notes.counts |= usage
        return usage

    async def num_context_tokens(self) -> int:
        """Return the number of tokens of the context; raise ApiError, also if it is far beyond the limit."""
        limit = context_token_limit(self._services)
        resolved = await self._run_cpu(partial(self._resolve, token_limit=limit), Memory.ALL)
        return resolved.num_context_tokens

    def parts(self, index: int, text: str) -> ReplyParts:
        """Return the parts of a reply's text; a prefill does not count."""
        context = self.contexts[index]
        return added_parts(text, context.template_input, turn=context.node.turn_id)

    # Private methods

    async def _run_cpu[T](self, work: Callable[[Memory], T], memory: Memory) -> T:
        estimate = self._estimate._replace(asks_history=has_reply(self._messages))
        return await self._services.run_cpu(self._owner, estimate, work, memory)

    def _repeated(self, earlier: StoredReply, params_of: ParamsOf) -> RepeatedTurns:
        """Return the turn of an earlier request."""
        services = self._services
        context = services.resolver.stored(self._owner, earlier.turn, epoch=services.engine.epoch)
        self.contexts = [context]
        (params,) = params_of(services.engine.info.limits.max_context_tokens - context.num_context_tokens)
        return RepeatedTurns(RepeatedTurn(earlier, params, services))

    def _find(self, memory: Memory) -> ResolvedContext:
        if memory is not Memory.ALL:
            self._services.metrics.rebuilt("turn_lost")
        if self._is_new:
            memory = Memory.NONE
        return self._resolve(memory, token_limit=context_token_limit(self._services))

    def _resolve(self, memory: Memory, *, token_limit: int | None) -> ResolvedContext:
        services = self._services
        try:
            return services.resolver.resolve(
                self._owner,
                self._messages,
                epoch=services.engine.epoch,
                durable=self._is_durable,
                memory=memory,
                token_limit=token_limit,
                template_input=self.template_input,
            )
        except ChatTemplateError as error:
            raise template_error(error, self._messages, "messages", self._paths) from error

    def _specs(self, params_of: ParamsOf, resolved: ResolvedContext) -> list[TurnSpec]:
        """Return one turn for each reply."""
        services = self._services
        check_num_tokens(services, resolved.num_context_tokens, "messages")
        self.contexts = [resolved, *(resolved.again() for _ in range(self._num_replies - 1))]
        room = services.engine.info.limits.max_context_tokens - resolved.num_context_tokens
        where = resolved.template_input, resolved.prompt_token_ids, services.tokenizer
        params = [with_placed_form(one, *where) for one in params_of(room)]
        return [
            context.spec(one, self._attachment(context, one))
            for context, one in zip(self.contexts, params, strict=True)
        ]

    def _attachment(self, context: ResolvedContext, params: SamplingParams) -> ResponseDraft | None:
        """Return the record to commit with a turn that is stored, else None."""
        node = context.node
        if not node.durable:
            return None
        services = self._services
        echo = completion_echo(services.model_name, params, self._metadata)
        items = items_of(context.messages)
        key = None if self._keyed is None else self._keyed.idempotency
        return stored_draft(self._owner, node.turn_id, echo, items, self.created_at_s, idempotency=key)


def stores_turns(services: Services, store: bool | None) -> bool:
    """Return whether a request's turns are stored in the history; `store` is its field."""
    return services.settings.chat_history == "durable" if store is None else store
