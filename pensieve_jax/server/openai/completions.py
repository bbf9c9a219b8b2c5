"""The route POST /v1/completions.

Owns: its request body, the steps of a completion, and the form of its response, whole and in chunks.
Does not know: chats or messages. Called by the application.

A prompt begins a new tree. The engine still reuses the KV cache of its first chunks if another conversation
of the same owner begins with the same tokens. Or the prompt continues the completion that
`previous_response_id` names, from the token ids as they were sampled, for clients that work with tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from pensieve_jax.core.errors import (
    InvalidRequestError,
    TokenizerMissingError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Output, TokenLogprob
from pensieve_jax.core.prompt_logprobs import PromptLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import RootFor, TurnNode, check_turn_id, new_turn_id, turn_id_under
from pensieve_jax.decoding.turn_spec import TurnSpec, check_token_ids
from pensieve_jax.history.reader import TurnView
from pensieve_jax.server.async_engine import AsyncDelta, AsyncTurn
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import as_api_error, invalid_value, renamed_fields
from pensieve_jax.server.http.long_json import EncodedList
from pensieve_jax.server.http.replies import HttpResponse, encode_json
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.completion_stream import reply_in
from pensieve_jax.server.openai.logprob_columns import LogprobColumns
from pensieve_jax.server.openai.prompt_logprobs import (
    check_not_streamed,
    prompt_logprobs_field,
    scored_by_the_first,
)
from pensieve_jax.server.turns.checks import (
    check_metadata,
    check_model,
    check_num_tokens,
    context_token_limit,
    previous_response,
    unknown_previous,
)
from pensieve_jax.server.turns.idempotency import KeyedRequest, keyed_request
from pensieve_jax.server.turns.items import stored_item
from pensieve_jax.server.turns.repeated import RepeatedTurn, RepeatedTurns
from pensieve_jax.server.turns.run import ReplyTurns, run_turns
from pensieve_jax.server.turns.sampling import (
    TEMPLATE_FIELDS,
    SamplingFields,
    choice_params,
    completion_usage,
)
from pensieve_jax.server.turns.stored import completion_echo, stored_draft
from pensieve_jax.server.turns.structured import AskedForm, asked_form
from pensieve_jax.server.workers import SOME_WORK, WorkEstimate
from pensieve_jax.text.token_texts import Echo, TokenOffsets, echo_of

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this route only
_MAX_PROMPTS = 64
MAX_PROMPTS_TOKENS: Final = 2**17
"""Limit of the tokens of several prompts. The engine queues all of a request at once, at 0.3 us a token."""
_ID_PREFIX = "cmpl-"
_STORED_PREFIX = "resp_"  # stored completions have it too


class CompletionBody(SamplingFields, kw_only=True):
    """The request body that `POST /v1/completions` takes."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingFields.UNSUPPORTED,
        **TEMPLATE_FIELDS,
        "add_special_tokens": (True,),
    }
    MISPLACED: ClassVar[Mapping[str, str]] = {
        **SamplingFields.MISPLACED,
        "messages": "Send them to /v1/chat/completions.",
        "input": "Use prompt.",
        "conversation": "Use /v1/responses, or continue from previous_response_id.",
        "instructions": "Use /v1/responses, or put them into prompt.",
        "max_completion_tokens": "Use max_tokens.",
        "max_output_tokens": "Use max_tokens.",
        "top_logprobs": "Use logprobs with their number.",
        "background": "Use /v1/responses.",
    }

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    previous_response_id: str | None = None
    return_token_ids: bool | None = None

    @property
    def num_echoed_logprobs(self) -> int | None:
        """Number of likely ids beside each echoed token of the prompt; None if these are not scored."""
        return self.logprobs if self.echo else None

    @property
    def num_replies(self) -> int:
        """Number of replies, whose prompts need not be valid yet."""
        several = isinstance(self.prompt, list) and not any(isinstance(one, int) for one in self.prompt)
        return (len(self.prompt) if several else 1) * self.num_choices

    @property
    def scores_field(self) -> str | None:
        """The field that asks for scores of the prompt; None without one."""
        if self.prompt_logprobs is not None:
            return "prompt_logprobs"
        return None if self.num_echoed_logprobs is None else "echo"

    @property
    def num_scored(self) -> int | None:
        """Value of the engine's `prompt_logprobs` that serves both forms."""
        asked = [one for one in (self.num_echoed_logprobs, self.prompt_logprobs) if one is not None]
        return max(asked, default=None)


async def create_completion(call: HttpRequest) -> HttpResponse:
    """Answer each prompt with one or more replies."""
    body = await call.decode(CompletionBody)
    check_model(call.services, body.model)
    keyed = await keyed_request(
        call, stores=bool(body.store), num_replies=body.num_replies, has_scores=body.scores_field
    )
    call.charge_stream(body.stream)
    estimate = WorkEstimate.of(len(call.body), asks_history=body.previous_response_id is not None)
    form = await asked_form(call, body)
    completion = await call.services.run_cpu(call.owner, estimate, Completion, call, body, form, keyed)
    await call.run_cpu(completion.encode)
    return await reply_in(completion, call, body, await completion.start())


ROUTES = [Route("POST", "/v1/completions", create_completion, takes_key=True)]


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the list of prompts of the `prompt` field; raise ApiError for lists of mixed types."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_value("prompt", "prompt is empty, but must be text or token ids.")
    ids = [one for one in prompt if isinstance(one, int)]
    if ids:
        if len(ids) < len(prompt):
            raise invalid_value("prompt", "prompt must be text, token ids, or a list of either.")
        return [ids]
    several = [one for one in prompt if not isinstance(one, int)]
    if len(several) > _MAX_PROMPTS:
        raise invalid_value(
            "prompt", f"prompt must be at most {_MAX_PROMPTS} prompts; send several requests."
        )
    return several


def _parent(services: Services, owner: str, body: CompletionBody, num_prompts: int) -> str | None:
    """Return the turn that a request continues from, or None; raise ApiError for an invalid one.

    A response must be stored. A completion need not be stored. But a completion that was stored and then
    deleted is unknown. So is the turn of a response or a chat that is named with a completion's prefix, and
    an id without a prefix.
    """
    previous = body.previous_response_id
    if previous is None:
        return None
    if num_prompts > 1:
        raise invalid_value(
            "previous_response_id", "previous_response_id must be left out with several prompts."
        )
    prefix = next((one for one in (_ID_PREFIX, _STORED_PREFIX) if previous.startswith(one)), None)
    if prefix is None:
        raise unknown_previous(previous)
    turn_id = previous.removeprefix(prefix)
    try:
        check_turn_id("previous_response_id", turn_id)
    except InvalidRequestError:
        raise unknown_previous(previous) from None
    if prefix == _STORED_PREFIX or services.resolver.index.remembers(owner, turn_id):
        previous_response(services, owner, _STORED_PREFIX + turn_id, named=previous)
    kept = _kept(services, owner, turn_id) if prefix == _ID_PREFIX else None
    if kept is not None:
        previous_response(services, owner, _STORED_PREFIX + turn_id, named=previous)
        if kept.messages is not None:
            raise unknown_previous(previous)
    return turn_id


def _kept(services: Services, owner: str, turn_id: str) -> TurnView | None:
    """Return a turn of the history, even if its response was deleted, or None."""
    if services.history is None:
        return None
    try:
        found: TurnView = services.history.turn(owner, turn_id)
    except UnknownTurnError:
        return None
    return found


def _turn_ids(
    parent_id: str | None, prompts: Sequence[Sequence[int]], num_choices: int, root_for: RootFor
) -> list[list[str]]:
    """Return for each prompt the turn ids of its choices; they share a root, so that one engine runs them."""
    found: list[list[str]] = []
    for token_ids in prompts:
        first = new_turn_id(parent_id) if parent_id else turn_id_under(root_for(len(token_ids)))
        found.append([first, *(new_turn_id(first) for _ in range(num_choices - 1))])
    return found


class Completion:
    """One completion request, from its prompts to its response. It is a `WireFormat`."""

    def __init__(
        self, call: HttpRequest, body: CompletionBody, asked: AskedForm, keyed: KeyedRequest | None = None
    ) -> None:
        """Check the decoded body as a whole; raise ApiError. `asked` is the form of its replies."""
        self.fields: Final[Mapping[str, str]] = {"durable": "store", **asked.fields}
        self._form = asked.form
        self._services = call.services
        self._notes = call.notes
        self._wait = call.unless_gone
        self._owner = call.owner
        self._body = body
        check_metadata(body.metadata)
        check_not_streamed("prompt_logprobs", body.prompt_logprobs, body.stream)
        check_not_streamed("echo", body.num_echoed_logprobs, body.stream)
        self._max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._prompts = _prompts(body.prompt)
        if len(self._prompts) * body.num_choices > _MAX_PROMPTS:
            limit = f"n times the number of prompts must be at most {_MAX_PROMPTS}."
            raise invalid_value("n", limit)
        self._keyed = keyed
        self._earlier = earlier = keyed.earlier if keyed is not None else None
        if earlier is None:
            self._parent_id = _parent(call.services, call.owner, body, len(self._prompts))
        else:  # the response that it continues may have been deleted since
            self._parent_id = earlier.turn.parent_id
        self._turn_ids: list[list[str]] = []
        self._created_at_s = call.services.now_s() if earlier is None else earlier.record.created_at_s
        self._token_ids: list[list[int]] = []
        self._params: list[SamplingParams] = []
        self._echoes: list[Echo] = []
        num_replies = len(self._prompts) * body.num_choices
        self._offsets = [TokenOffsets(call.services.tokenizer) for _ in range(num_replies)]

    def encode(self) -> None:
        """Tokenize the prompts and check the options; raise ApiError and TokenizerMissingError."""
        tokenizer, limits = self._services.tokenizer, self._services.engine.info.limits
        token_limit = context_token_limit(self._services)
        found: list[list[int]] = []
        for index, prompt in enumerate(self._prompts):
            if isinstance(prompt, list):
                found.append(prompt)
            elif tokenizer is None:
                raise TokenizerMissingError
            else:
                try:
                    found.append(
                        tokenizer.encode(prompt, add_bos=self._parent_id is None, token_limit=token_limit)
                    )
                except InvalidRequestError as error:
                    raise as_api_error(error, {"prompt": self._field(index)}) from error
            if not found[-1]:
                raise invalid_value(self._field(index), f"{self._field(index)} must have at least one token.")
            check_num_tokens(self._services, len(found[-1]), self._field(index))
            # Invalid ids never reach the engine.
            check_token_ids(self._field(index), found[-1], limits.vocab_size)
        num_tokens = sum(map(len, found))
        if len(found) > 1 and num_tokens > MAX_PROMPTS_TOKENS:
            limit = f"at most {MAX_PROMPTS_TOKENS:,} tokens together; send several requests"
            raise invalid_value("prompt", f"prompt has {num_tokens:,} tokens in all, but must have {limit}.")
        self._token_ids = found
        with renamed_fields(self.fields):
            params = choice_params(
                self._body,
                self._services.defaults,
                max_tokens=self._max_tokens,
                logprobs=self._body.logprobs,
                structured=self._form,
            )
        self._params = scored_by_the_first(params, self._body.num_scored)
        if self._body.echo:
            has_offsets = self._body.num_echoed_logprobs is not None
            self._echoes = [
                echo_of(tokenizer, prompt, token_ids, has_offsets=has_offsets)
                for prompt, token_ids in zip(self._prompts, found, strict=True)
            ]

    async def start(self) -> ReplyTurns:
        """Wait for a ticket and submit the turns; raise ApiError, and StorageQuotaError for stored ones.

        The turn of an earlier request with the same key is returned instead, if there was one.
        """
        body, services, earlier = self._body, self._services, self._earlier
        if earlier is not None:
            self._turn_ids = [[earlier.turn.turn_id]]
            turn = await services.run_cpu(
                self._owner, SOME_WORK, RepeatedTurn, earlier, self._params[0], services
            )
            return RepeatedTurns(turn)
        if body.store:
            await services.storage.check(self._owner)

        async def start() -> Sequence[AsyncTurn]:
            # The ids are chosen only now, after the wait: a new root goes to the engine that is least loaded.
            self._turn_ids = _turn_ids(
                self._parent_id, self._token_ids, body.num_choices, services.resolver.root_for
            )
            turns = services.engine.submit_all(self._specs(self._params))
            try:
                for turn in turns:
                    await turn.accepted()
            except UnknownTurnError as error:
                raise unknown_previous(body.previous_response_id or error.turn_id) from error
            return turns

        with renamed_fields(self.fields):
            return await run_turns(
                services,
                self._owner,
                start,
                num_turns=len(self._prompts) * body.num_choices,
                num_tokens=sum(map(len, self._token_ids)),
                max_tokens=self._max_tokens,
                num_shared=body.num_choices,
                wait=self._wait,
            )

    # Methods of WireFormat

    async def record_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Count how the contexts were found, and return the usage."""
        told = completion_usage([output.usage for output in outputs], self._body.num_choices)
        if self._earlier is not None:  # it was counted when the turn ran
            return told
        for output in outputs:
            usage = output.usage
            found = usage.reused_gpu_tokens + usage.swapped_in_tokens
            kind = "chunk" if found else "none"
            self._services.metrics.matched("id" if self._parent_id is not None else kind)
        self._notes.counts |= told
        return told

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the response with the texts of all choices, without usage."""
        choices = [
            {
                "index": index,
                "text": self._echoed(index) + output.text,
                "logprobs": self._all_logprobs(index, output.logprobs, self._scores(index, outputs)),
                "finish_reason": output.finish_reason,
                **({"token_ids": output.token_ids} if self._body.return_token_ids else {}),
                **self._prompt_logprobs(index, outputs),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self.head(), "choices": choices}

    def head(self) -> dict[str, Any]:
        """Return the fields that the response and all chunks share."""
        return {
            "id": f"{_ID_PREFIX}{self._turn_ids[0][0]}",
            "object": "text_completion",
            "created": int(self._created_at_s),
            "model": self._services.model_name,
        }

    def first_choices(self) -> Iterable[bytes]:
        """Return the echoed prompt of each choice."""
        if not self._body.echo:
            return ()
        num_replies = len(self._prompts) * self._body.num_choices
        return [_choice(index, self._echoed(index)) for index in range(num_replies)]

    def choices(self, index: int, delta: AsyncDelta) -> Iterable[bytes]:
        """Return text, logprobs and token ids; some token ids have no text."""
        if not delta.text and not delta.logprobs and not self._body.return_token_ids:
            return ()
        token_ids = delta.token_ids if self._body.return_token_ids else None
        return (_choice(index, delta.text, self._logprobs(index, delta.logprobs), token_ids=token_ids),)

    def last_choices(self, index: int, output: Output) -> Iterable[bytes]:
        """Return the last chunk of a choice, with only its finish reason."""
        return (_choice(index, "", reason=output.finish_reason),)

    # Private methods

    def _field(self, index: int) -> str:
        return "prompt" if len(self._prompts) == 1 else f"prompt[{index}]"

    def _specs(self, params: Sequence[SamplingParams]) -> list[TurnSpec]:
        """Return a turn for each choice of each prompt; `params` has one entry for each choice."""
        return [
            TurnSpec(token_ids, one, node=self._node(index, turn_id, one))
            for index, token_ids in enumerate(self._token_ids)
            for turn_id, one in zip(self._turn_ids[index], params, strict=True)
        ]

    def _node(self, index: int, turn_id: str, params: SamplingParams) -> TurnNode:
        """Return the tree node of a choice, with the record to store with it."""
        draft = None
        if self._body.store:
            services, prompt = self._services, self._prompts[index]
            items = [stored_item("user", [prompt])] if isinstance(prompt, str) else []
            echo = completion_echo(services.model_name, params, self._body.metadata)
            key = None if self._keyed is None else self._keyed.idempotency
            draft = stored_draft(self._owner, turn_id, echo, items, self._created_at_s, idempotency=key)
        return TurnNode(
            turn_id=turn_id,
            parent_id=self._parent_id,
            owner=self._owner,
            durable=bool(self._body.store),
            attachment=draft,
        )

    def _echoed(self, index: int) -> str:
        return self._echoes[index // self._body.num_choices].text if self._body.echo else ""

    def _scores(self, index: int, outputs: Sequence[Output]) -> Sequence[PromptLogprob | None]:
        """Return the log-probabilities of a choice's prompt, which the first of its choices has."""
        return outputs[index - index % self._body.num_choices].prompt_logprobs or ()

    def _prompt_logprobs(self, index: int, outputs: Sequence[Output]) -> dict[str, Any]:
        number = self._body.prompt_logprobs
        if number is None:
            return {}
        entries = self._scores(index, outputs)
        return {"prompt_logprobs": prompt_logprobs_field(entries, number, self._services.token_texts)}

    def _all_logprobs(
        self,
        index: int,
        logprobs: Sequence[TokenLogprob] | None,
        scores: Sequence[PromptLogprob | None],
    ) -> dict[str, EncodedList] | None:
        """Return `_logprobs` of a whole reply."""
        columns = self._logprobs(index, logprobs, scores)
        return None if columns is None else {name: EncodedList(column) for name, column in columns.items()}

    def _logprobs(
        self, index: int, logprobs: Sequence[TokenLogprob] | None, scores: Sequence[PromptLogprob | None] = ()
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's next tokens in this API's columns.

        If the prompt is echoed, `scores` are those of its tokens, which come first.
        """
        if logprobs is None:
            return None
        texts, offsets = self._services.token_texts, self._offsets[index]
        columns = LogprobColumns(texts)
        number = self._body.num_echoed_logprobs
        if number is not None and scores:
            place = index // self._body.num_choices
            columns.add_prompt(self._token_ids[place], scores, self._echoes[place].offsets, number)
        start = len(self._echoed(index))
        found = [start + offsets.next(one.token_id, texts.text(one.token_id)) for one in logprobs]
        columns.add_reply(logprobs, found)
        return columns.written()


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    *,
    reason: str | None = None,
    token_ids: Sequence[int] | None = None,
) -> bytes:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return encode_json(choice if token_ids is None else {**choice, "token_ids": token_ids})
