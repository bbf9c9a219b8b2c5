"""A template that writes earlier replies differently, behind HTTP: contexts are renderings of the whole."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.history import open_store
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import HistoryTurns, TurnIndex
from pensieve_jax.server.http.services import Services
from pensieve_jax.text import ChatFormat, ReplyReader, Tokenizer, byte_tokenizer
from tests.engine.oracles import FakeBench, TurnFacts
from tests.server.engine_process.fakes import FakeEngines, fake_engine
from tests.server.fakes import Harness
from tests.server.live import LiveServer

HALVES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{{ m.content[m.content | length // 2:] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Replies lose their first half, as those with reasoning do."""
PARAMS = {"temperature": 0, "max_output_tokens": 12}


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=HALVES)


class FakeModelServer(LiveServer):
    """An engine on the fake runner behind HTTP."""

    async def _services(self, stack: contextlib.AsyncExitStack) -> Services:
        self.engines = FakeEngines(self._path)
        engine = await stack.enter_async_context(fake_engine(self.engines))
        reader = stack.enter_context(HistoryReader(self._path, fingerprint="test"))
        resolver = Resolver(tokenizer(), "test", TurnIndex(HistoryTurns(reader, ReplyReader(tokenizer()))))
        parts = {"tokenizer": tokenizer(), "resolver": resolver, "history": reader}
        self.harness = Harness([], engine, **parts)  # type: ignore[arg-type]
        return self.harness.services


def check_turns(path: Path, ids: list[str]) -> None:
    """Check the stored turns of responses: their contexts, and their tokens against the reference."""
    written = tokenizer()
    with open_store(path, fingerprint="test") as store:
        for turn_id in ids:
            record = store.load_turn("", turn_id)
            *_, last = record.turns
            messages = []
            for turn in record.turns[:-1]:
                messages += [*(turn.messages or ()), {"role": "assistant", "content": turn.output_text}]
            messages += last.messages or ()
            context = tuple(record.token_ids.tolist())[: -len(last.output_token_ids)]
            whole = ChatFormat(written).token_ids(messages)
            assert written.decode_raw(context) == written.decode_raw(whole)
            params = SamplingParams(temperature=0.0, max_tokens=12)
            facts = TurnFacts((), context, params, last.seed, 2000)
            FakeBench().check_tokens(facts, last.output_token_ids, whole=True)


@pytest.mark.parametrize("restarts", [False, True])
def test_responses_by_id_in_the_background_and_by_messages(tmp_path: Path, restarts: bool) -> None:
    """Also after the front end has forgotten all turns."""
    path, ids = tmp_path / "history.sqlite", []
    sent = [{"role": "user", "content": "first"}]
    previous = None
    for number in range(2 if restarts else 1):
        with FakeModelServer(path) as server, server.client() as client:
            for background in (False, True, False):
                response = client.responses.create(
                    input=sent[-1:], previous_response_id=previous, background=background, **PARAMS
                )
                while response.status in ("queued", "in_progress"):
                    response = client.responses.retrieve(response.id)
                assert response.status in ("completed", "incomplete")  # as it ends by length
                previous = response.id
                ids.append(response.id.removeprefix("resp_"))
                sent.append({"role": "assistant", "content": response.output_text})
                sent.append({"role": "user", "content": f"more {number}"})
            resent = client.responses.create(input=sent, **PARAMS)
            ids.append(resent.id.removeprefix("resp_"))
            chat = client.chat.completions.create(
                model="fake", messages=sent, temperature=0, max_completion_tokens=12
            )
            assert chat.choices[0].message.content == resent.output_text
            assert chat.usage.prompt_tokens == resent.usage.input_tokens  # type: ignore[union-attr]
            rewritten = server.engines.harness.engine._stats.num_turns_rewritten
            assert rewritten >= 3
    check_turns(path, ids)
    with open_store(path, fingerprint="test") as store:
        record = store.load_turn("", ids[-1])
        assert len(record.turns) == len(ids) - restarts, "messages found their turns"
        assert any(turn.keep is not None for turn in record.turns)
