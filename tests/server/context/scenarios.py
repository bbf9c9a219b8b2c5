"""Random trees of conversations, with an independent model of what every resolved context must be."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pensieve_jax
from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.outputs import Output, Usage
from pensieve_jax.server.context.resolver import ResolvedContext, Resolver
from pensieve_jax.server.context.turn_index import PastTurn, TurnIndex
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.chat import ChatFormat, EarlierTurn
from pensieve_jax.text.loading import load_tokenizer

CHAT_MODEL = Path(pensieve_jax.__file__).parent / "chat_model"
WORDS = ("why", "is", "the sky", "blue ", " and", "\n", "42", "yes", "no ", "tell me", "é")


def tokenizer() -> Tokenizer:
    loaded = load_tokenizer(CHAT_MODEL)
    assert loaded is not None
    return loaded


class FakeSource:
    """Durable turns in a list, searched as a history searches them."""

    def __init__(self) -> None:
        self.turns: list[PastTurn] = []

    def find_chain(self, owner: str, before: bytes, reply: dict) -> PastTurn | None:
        for turn in reversed(self.turns):
            same = turn.owner == owner and turn.before == before
            if same and turn.reply["content"].rstrip() == reply["content"].rstrip():
                return turn
        return None

    def path(self, owner: str, turn_id: str) -> list[PastTurn]:
        path, wanted = [], turn_id
        for turn in reversed(self.turns):  # parents stand before their children
            if (turn.owner, turn.turn_id) == (owner, wanted):
                path.append(turn)
                if turn.parent_id is None:
                    return path[::-1]
                wanted = turn.parent_id
        raise UnknownTurnError(turn_id)


@dataclass
class ExpectedTurn:
    """The scenario's own record of a turn: its whole path, as messages and as ids."""

    owner: str
    durable: bool
    messages: list[dict]
    token_ids: list[int]
    earlier: list[EarlierTurn]
    turn_id: str
    parent: ExpectedTurn | None
    epoch: int

    @property
    def roles_and_texts(self) -> list[tuple[str, str]]:
        return roles_and_texts(self.messages)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def roles_and_texts(messages: list[dict]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"].rstrip()) for message in messages]


def output_of(token_ids: list[int], text: str, finish_reason: str = "stop", **usage: int) -> Output:
    known = {"reused_gpu_tokens": 0, "swapped_in_tokens": 0, "recomputed_tokens": 0, "prefilled_tokens": 1}
    counted = Usage(prompt_tokens=1, output_tokens=len(token_ids), **(known | usage))
    return Output(None, tuple(token_ids), text, finish_reason, counted, 0)


@dataclass
class Scenario:
    """One random run: conversations that are resent, edited, regenerated and cut, of two owners."""

    seed: int
    max_bytes: int = 256 << 20
    turns: list[ExpectedTurn] = field(default_factory=list)
    num_found: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tokenizer = tokenizer()
        self.source = FakeSource()
        self.index = TurnIndex(self.source, max_bytes=self.max_bytes)
        self.resolver = Resolver(self.tokenizer, "model:1", self.index)
        self.format = ChatFormat(self.tokenizer)
        self.epoch = 1

    def run(self, num_turns: int = 25) -> None:
        for _ in range(num_turns):
            if self.random.random() < 0.04:
                self.epoch += 1
            owner, durable = self.random.choice(("ann", "bob")), self.random.random() < 0.6
            context = self.context(owner)
            resolved = self.resolver.resolve(owner, context, epoch=self.epoch, durable=durable)
            self.check(resolved, owner, context, durable)
            self.commit(resolved, context)

    def text(self) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randint(1, 3)))

    def context(self, owner: str) -> list[dict]:
        """Return what a client sends: the history of some turn, perhaps edited or cut, and a new message."""
        draw = self.random.random()
        if not self.turns or draw < 0.15:
            context = [{"role": "system", "content": self.text()}] if self.random.random() < 0.5 else []
        else:
            turn = self.random.choice(self.turns)  # may belong to the other owner: it must not be found
            context = [dict(message) for message in turn.messages]
            if draw < 0.3:
                self.random.choice(context)["content"] = self.text()
            elif draw < 0.4:
                message = self.random.choice(context)
                message["role"] = {"user": "assistant", "assistant": "user"}.get(message["role"], "user")
            elif draw < 0.5:
                del context[self.random.randrange(len(context)) :]
            elif draw < 0.6:
                return context[:-1]  # resend the same context: a regeneration
        if self.random.random() < 0.3:
            for message in context:
                message["content"] += self.random.choice((" ", "\n", ""))
        return [*context, {"role": "user", "content": self.text()}]

    def expected(self, owner: str, context: list[dict], durable: bool) -> list[ExpectedTurn]:
        """Return the turns that may be continued: those whose path is the longest prefix of the context."""
        words = roles_and_texts(context)
        alive = [
            turn
            for turn in self.turns
            if turn.owner == owner
            and (turn.durable or (turn.epoch == self.epoch and not durable))
            and len(turn.messages) < len(context)
            and turn.roles_and_texts == words[: len(turn.messages)]
        ]
        longest = max((len(turn.messages) for turn in alive), default=0)
        return [turn for turn in alive if len(turn.messages) == longest]

    def check(self, resolved: ResolvedContext, owner: str, context: list[dict], durable: bool) -> None:
        matches = self.expected(owner, context, durable)
        parent_id = None if resolved.parent is None else resolved.parent.turn_id
        assert resolved.node.parent_id == parent_id
        assert (resolved.node.owner, resolved.node.durable) == (owner, durable)
        if not matches:
            assert parent_id is None
            assert resolved.prompt_token_ids == self.format.token_ids(context)
            assert resolved.keep == 0
            return
        by_id = {turn.turn_id: turn for turn in matches}
        assert parent_id in by_id, f"{parent_id} is none of {list(by_id)}"
        turn = by_id[parent_id]
        self.num_found += 1
        new = context[len(turn.messages) :]
        expected = self.format.turn_prompt(turn.earlier, turn.token_ids, new)
        assert (resolved.keep, resolved.prompt_token_ids) == expected
        whole = self.format.token_ids([*turn.messages, *new])
        written = self.tokenizer.decode_raw([*turn.token_ids[: resolved.keep], *resolved.prompt_token_ids])
        assert written == self.tokenizer.decode_raw(whole)

    def commit(self, resolved: ResolvedContext, context: list[dict]) -> None:
        ids = [self.random.randrange(20, self.tokenizer.vocab_size) for _ in range(self.random.randint(1, 4))]
        text = self.tokenizer.decode(ids)
        finish_reason = self.random.choice(("stop", "length"))
        ids = [*ids, self.tokenizer.eos_id] if finish_reason == "stop" else ids
        turn = resolved.commit(output_of(ids, text, finish_reason))
        assert list(turn.output_token_ids) == ids
        if turn.durable:
            self.source.turns.append(turn)
        parent = next((turn for turn in self.turns if turn.turn_id == resolved.node.parent_id), None)
        new = context if parent is None else context[len(parent.messages) :]
        before = [] if parent is None else parent.messages
        path = [] if parent is None else parent.token_ids
        token_ids = [*path[: resolved.keep], *resolved.prompt_token_ids, *ids]
        earlier = [] if parent is None else parent.earlier
        self.turns.append(
            ExpectedTurn(
                owner=resolved.node.owner,
                durable=turn.durable,
                messages=[*before, *new, {"role": "assistant", "content": text}],
                token_ids=token_ids,
                earlier=[*earlier, EarlierTurn(new, text, ids, len(token_ids))],
                turn_id=turn.turn_id,
                parent=parent,
                epoch=self.epoch,
            )
        )
        # The turn's record agrees with the model's: no id was changed on the way.
        path = self.index.path(turn)
        assert [list(each.output_token_ids) for each in path] == [
            list(each.output_token_ids) for each in self.turns[-1].earlier
        ]
        assert turn.num_tokens == len(self.turns[-1].token_ids)
