"""An engine whose replies a test writes, the services around it, and an ASGI client."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import httpx2
import numpy as np

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import EngineClosedError, PensieveError
from pensieve_jax.core.outputs import FinishReason, Output, TokenLogprob, Usage
from pensieve_jax.core.prompt_logprobs import PromptLogprob, PromptLogprobs
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.branches import TurnPosition
from pensieve_jax.engine.validation import check_turns
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.server.async_engine import AsyncDelta, EngineInfo, EngineState, num_entries
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import TurnIndex
from pensieve_jax.server.engine_process.messages import sent_spec, submission
from pensieve_jax.server.engine_process.wire import FrameWriter
from pensieve_jax.server.http.admission import TurnAdmission
from pensieve_jax.server.http.app import Lifespan, Route, make_app
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.ledger import Ledger
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.metrics import Metrics
from pensieve_jax.text import ChatFormat, Tokenizer
from pensieve_jax.text.loading import byte_tokenizer
from pensieve_jax.text.reply_tokens import ReplyTokens
from pensieve_jax.text.token_texts import TokenTexts
from tests.server.context.no_turns import NoTurns

MODEL = "fake"
LIMITS = ModelLimits(vocab_size=262, max_context_tokens=4096, eos_token_ids=(257,), max_logprobs=8)


def prompt_scores(spec: TurnSpec) -> PromptLogprobs | None:
    """Return log-probabilities that follow from the ids: each has the rank 3, after the two ids before it."""
    number = spec.params.prompt_logprobs
    if number is None:
        return None
    ids = list(map(int, spec.prompt_token_ids))
    tops = [{abs(one - rank): -rank / 8 for rank in range(1, number + 1)} for one in ids]
    found = [PromptLogprob(one, -one / 4, 3, top) for one, top in zip(ids, tops, strict=True)]
    has_parent = spec.node is not None and spec.node.parent_id is not None
    return PromptLogprobs.of(found if has_parent else [None, *found[1:]])


class FakeTurn:
    """A running turn. `feed`, `finish` and `fail` play the engine's part."""

    def __init__(self, spec: TurnSpec, turn_id: str) -> None:
        self.spec = spec
        self.cancelled = False
        self.output: Output | None = None
        self._turn_id = turn_id
        self._deltas: deque[AsyncDelta] = deque()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        self._error: BaseException | None = None
        self._is_refused = False
        self._accepted = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def turn_id(self) -> str:
        return self._turn_id

    @property
    def num_unread_entries(self) -> int:
        return sum(num_entries(delta.logprobs) for delta in self._deltas)

    def accept(self) -> None:
        self._accepted.set()

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> None:
        """Send a piece of the reply; by default one token for each byte."""
        ids = tuple(text.encode()) if token_ids is None else tuple(token_ids)
        wanted = self.spec.params.logprobs
        logprobs = None
        if wanted is not None:
            tops = [{token: -0.5, **{(token + i) % 256: -0.5 - i for i in range(1, wanted)}} for token in ids]
            logprobs = tuple(
                TokenLogprob(token, -0.5, top if wanted else {}) for token, top in zip(ids, tops, strict=True)
            )
            self._logprobs += logprobs
        self._token_ids += ids
        self._text += text
        self._deltas.append(AsyncDelta(text, ids, logprobs))
        self._changed.set()

    def finish(self, reason: FinishReason = "stop", *, stop_string: str | None = None, **usage: int) -> None:
        counts = {
            "prompt_tokens": len(self.spec.prompt_token_ids),
            "reused_gpu_tokens": 0,
            "swapped_in_tokens": 0,
            "recomputed_tokens": 0,
            "prefilled_tokens": len(self.spec.prompt_token_ids),
            "output_tokens": len(self._token_ids),
        } | usage
        self.output = Output(
            conversation_id=None,
            token_ids=tuple(self._token_ids),
            text=self._text,
            finish_reason=reason,
            usage=Usage(**counts),
            seed=7,
            logprobs=None if self.spec.params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=prompt_scores(self.spec),
            stop_string=stop_string,
        )
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._is_refused = not self._accepted.is_set()
        self._accepted.set()
        self._changed.set()

    # The interface of AsyncTurn.

    async def accepted(self) -> None:
        await self._accepted.wait()
        if self._error is not None and self._is_refused:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        await self.accepted()
        while True:
            if self._deltas:
                merged = list(self._deltas)
                self._deltas.clear()
                yield _merged(merged)
                continue
            if self._error is not None:
                raise self._error
            if self.output is not None:
                return
            self._changed.clear()
            await self._changed.wait()

    async def result(self) -> Output:
        async for _ in self:
            pass
        assert self.output is not None
        return self.output

    async def cancel(self) -> None:
        if self.output is None and self._error is None:
            self.cancelled = True
            self.finish("cancelled")


def _merged(deltas: list[AsyncDelta]) -> AsyncDelta:
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [one for delta in deltas for one in delta.logprobs or ()]
    return AsyncDelta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        None if deltas[0].logprobs is None else tuple(logprobs),
    )


def say(text: str, **usage: int) -> Callable[[FakeTurn], None]:
    """A script: the reply comes in pieces of three characters, and ends well."""

    def script(turn: FakeTurn) -> None:
        pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
        room = turn.spec.params.max_tokens
        if not room:
            turn.finish("length", **usage)
            return
        for piece in pieces:
            ids = piece.encode()
            turn.feed(piece[:room], ids[:room])
            room -= len(ids)
            if room <= 0:
                turn.finish("length", **usage)
                return
        turn.feed("", (257,))
        turn.finish("stop", **usage)

    return script


def sampled(token_ids: Sequence[int]) -> Callable[[FakeTurn], None]:
    """A script: the model samples these ids; the reply's text and end follow from the turn's parameters."""

    def script(turn: FakeTurn) -> None:
        params = turn.spec.params
        ending_ids = params.ending_ids(LIMITS.eos_token_ids)
        template = turn.spec.template_input
        reply = ReplyTokens(params, ending_ids, params.max_tokens, byte_tokenizer(), template)
        none = np.empty(0)
        if params.max_tokens == 0:
            turn.finish("length")
            return
        for token_id in token_ids:
            num_pieces = len(reply.pieces)
            reason = reply.accept(token_id, 0.0, none, none)
            turn.feed("".join(reply.pieces[num_pieces:]), (token_id,))
            if reason is not None:
                turn.finish(reason, stop_string=reply.stop_string)
                return

    return script


class _NoBranches:
    """A stand-in for branches: every turn begins a tree, since the test chooses the parents itself."""

    def find(self, node: TurnNode, known: object = None) -> TurnPosition:
        return TurnPosition(None, {}, [])


class _NoConversations:
    """The part of a conversation table that checks use; turns stand in a tree."""

    branches = _NoBranches()

    def is_busy(self, conversation_id: str) -> bool:
        return False

    def num_tokens(self, conversation_id: str | None) -> int:
        return 0


DESCRIPTION: dict[str, Any] = {
    "model": {"num_active_parameters": 13_000_000_000, "weights_bytes": 26_000_000_000},
    "device": {"count": 1},
    "cache": {
        "page_bytes": 6_553_600,
        "chunk_tokens": 32,
        "gpu_tokens": 195_264,
        "slot_bytes": 6_553_600,
        "summary": "KV cache: 37.2 GiB on the GPU (195,264 tokens), nothing in host memory",
    },
}
"""The part of `LLM.describe` that a server reads; sizes of a model of 13 billion weights."""


class FakeEngine:
    """Engine that checks turns, keeps them in `turns`, and runs `script` on each accepted one.

    It also raises for arguments that could not be sent to an engine's process.

    Attributes:
        script: plays the engine for each accepted turn; with None the test does it.
        refuse: errors that turns raise at `accepted`, one each, in order.
        changes: what was applied; calls: what was called.
    """

    def __init__(self, script: Callable[[FakeTurn], None] | None = None, *, max_num_running: int = 4) -> None:
        self.script = say("hello there") if script is None else script
        self.state: EngineState = "ready"
        self.epoch = 1
        self.turns: list[FakeTurn] = []
        self.refuse: deque[BaseException] = deque()
        self.changes: list[HistoryChange] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {"stats": {}, "census": {}, "distributions": {}}
        self.last_heard_s = 0.0
        self.last_stats: dict[str, Any] = {}
        self.submitted = asyncio.Event()
        self.info = EngineInfo(
            model_name=MODEL,
            source=f"random:{MODEL}",
            fingerprint="fingerprint",
            history=":memory:",
            limits=LIMITS,
            max_num_running=max_num_running,
            chunk_tokens=32,
            description=DESCRIPTION,
        )
        self._tokenizer = byte_tokenizer()
        self._ids = itertools.count()

    def submit(self, spec: TurnSpec) -> FakeTurn:
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[FakeTurn]:
        if self.state != "ready":
            raise EngineClosedError(f"The engine is {self.state}.")
        turns = [
            FakeTurn(spec, spec.node.turn_id if spec.node is not None else f"local-{next(self._ids)}")
            for spec in specs
        ]
        self.turns += turns
        self.submitted.set()
        FrameWriter().frame(submission([sent_spec(i, spec) for i, spec in enumerate(specs)]))
        error = self.refuse.popleft() if self.refuse else self._wrong(specs)
        if error is not None:
            for turn in turns:
                turn.fail(error)
            return turns
        for turn in turns:
            turn.accept()
            if self.script is not None:
                self.script(turn)
        return turns

    def _wrong(self, specs: Sequence[TurnSpec]) -> PensieveError | None:
        try:
            begun = [replace(spec, keep=None) for spec in specs]  # the stand-in has no tokens to keep
            check_turns(begun, LIMITS, cast(Any, _NoConversations()), self._tokenizer)
        except PensieveError as error:
            return error
        return None

    async def apply(self, change: HistoryChange) -> None:
        self.changes.append(change)

    async def call(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, arguments))
        return self.answers[name]

    async def drain(self, deadline_s: float) -> None:
        self.state = "draining"


class Harness:
    """An application around a fake engine, with client operations."""

    def __init__(
        self,
        routes: Iterable[Route],
        engine: FakeEngine | None = None,
        settings: ServerSettings | None = None,
        *,
        keys: ApiKeys | None = None,
        tokenizer: Tokenizer | None = None,
        lifespans: Sequence[Lifespan] = (),
        **parts: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.clock = VirtualClock(1_000_000.0)
        settings = settings or ServerSettings()
        tokenizer = tokenizer or byte_tokenizer()
        defaults: dict[str, Any] = {
            "engine": self.engine,
            "settings": settings,
            "keys": keys or ApiKeys(settings.api_keys_file),
            "limits": TurnAdmission(self.engine, settings, self.clock.now),
            "ledger": Ledger(settings.resource_budgets(), has_keys=settings.api_keys_file is not None),
            "metrics": Metrics(MODEL),
            "tokenizer": tokenizer,
            "chat_format": ChatFormat(tokenizer),
            "defaults": {"temperature": 1.0},
            "resolver": Resolver(tokenizer, "fingerprint", TurnIndex(NoTurns())),
            "token_texts": TokenTexts(tokenizer),
            "started_at": 1_000_000,
            "history": None,
            "now_s": self.clock.now,
        }
        self.services = Services(**(defaults | parts))
        self.app = make_app(self.services, routes, lifespans)

    def client(self, **options: Any) -> httpx2.AsyncClient:
        """Return a client in this process, without a socket; it returns an answer once it is complete."""
        transport = httpx2.ASGITransport(cast(Any, self.app), raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000", **options)

    def open(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Open:
        """Send a request whose answer the test reads message by message, or not at all."""
        return Open(self.app, method, path, body, headers or {})


class Open:
    """One request on its own connection, which the test may drop."""

    def __init__(self, app: Any, method: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"host": "localhost", "content-type": "application/json", **headers}
        path, _, query = path.partition("?")
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.takes = asyncio.Event()  # cleared: the client takes nothing more, and `send` waits
        self.takes.set()
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        message = await self._incoming.get()
        if message["type"] == "http.disconnect":
            self._incoming.put_nowait(message)  # repeat it, as servers do
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        await self.takes.wait()
        self._outgoing.put_nowait(message)

    async def next(self) -> dict[str, Any]:
        """Return the next ASGI message that the application sent."""
        return await self._outgoing.get()

    async def whole(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body once the answer is complete."""
        await self.task
        start = self._outgoing.get_nowait()
        parts = []
        while not self._outgoing.empty():
            parts.append(self._outgoing.get_nowait().get("body", b""))
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(parts)

    def leave(self) -> None:
        """Close the client's connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})


def ask(harness: Harness, method, path, body=None):
    """Return status and decoded answer of one request."""

    async def answer():
        return await harness.open(method, path, body).whole()

    status, headers, raw = asyncio.run(answer())
    is_json = headers["content-type"] == "application/json"
    return status, json.loads(raw) if is_json else raw.decode()
