"""Completions that continue one another: by the sampled ids, and only for their owner."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pensieve_jax import LLM, SamplingParams
from pensieve_lab.serving.served import ServedProcess
from tests.server.conftest import SIZES, engine_config

PROMPT = "Tell me about the weather in San Jose, and where to eat there in the evening."
FIXED = {"model": "chat", "temperature": 0, "max_tokens": 20}
EVERY_ID = {"return_token_ids": True, "ignore_eos": True}

pytestmark = pytest.mark.long  # a server with keys of its own


@pytest.fixture(scope="module")
def server(tmp_path_factory, compilation_cache) -> Iterator[ServedProcess]:
    """Yield the chat model behind two keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{owner}:{hashlib.sha256(owner.encode()).hexdigest()}" for owner in ("ann", "bob")]
    keys.write_text("\n".join(lines))
    flags = [*SIZES, f"--compilation_cache_dir={compilation_cache}", f"--api_keys_file={keys}"]
    with ServedProcess(flags) as served:
        yield served


@pytest.fixture
def ann(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="ann", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any, *, previous: str | None = None, **fields: Any) -> Any:
    more = EVERY_ID | ({} if previous is None else {"previous_response_id": previous})
    return client.completions.create(**FIXED | fields, prompt=prompt, extra_body=more)


def ids_of(completion: Any) -> list[int]:
    found: list[int] = completion.choices[0].to_dict()["token_ids"]
    return found


def test_the_returned_ids_are_the_sampled_ones_and_the_next_turn_continues_them(ann, compilation_cache):
    first = complete(ann, PROMPT)
    second = complete(ann, [7, 8, 9], previous=first.id)
    third = complete(ann, " And then?", previous=second.id)
    with LLM("chat", dtype="float32", config=engine_config(compilation_cache), progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outputs = [
            llm.generate([prompt], params, conversation_ids=["a"])[0]
            for prompt in (PROMPT, [7, 8, 9], " And then?")
        ]
    assert [ids_of(one) for one in (first, second, third)] == [list(one.token_ids) for one in outputs]
    assert [one.choices[0].text for one in (first, second, third)] == [one.text for one in outputs]
    past = first.usage.total_tokens
    assert second.usage.prompt_tokens == past + 3
    assert second.usage.prompt_tokens_details.cached_tokens == past - 1
    assert second.usage.to_dict()["pensieve"]["recomputed_tokens"] == 0


def test_two_completions_continue_one(ann):
    first = complete(ann, PROMPT)
    one = complete(ann, [7], previous=first.id)
    other = complete(ann, [8], previous=first.id)
    again = complete(ann, [7], previous=first.id)
    assert ids_of(one) == ids_of(again)
    assert other.usage.prompt_tokens == one.usage.prompt_tokens
    # A sibling shares whole chunks, and recomputes less than one chunk of the path.
    assert other.usage.to_dict()["pensieve"]["recomputed_tokens"] < 32


def test_a_stream_has_every_id(ann):
    whole = complete(ann, PROMPT)
    pieces = [piece.choices[0].to_dict() for piece in complete(ann, PROMPT, stream=True)]
    assert [token_id for piece in pieces for token_id in piece.get("token_ids", ())] == ids_of(whole)
    assert "".join(piece["text"] for piece in pieces) == whole.choices[0].text


def test_ids_are_returned_only_on_request(ann):
    told = ann.completions.create(**FIXED, prompt="Hi").choices[0].to_dict()
    assert "token_ids" not in told


def test_several_prompts_cannot_continue_one_completion(ann):
    first = complete(ann, PROMPT)
    with pytest.raises(openai.BadRequestError) as raised:
        complete(ann, ["a", "b"], previous=first.id)
    assert (raised.value.code, raised.value.param) == ("invalid_value", "previous_response_id")


def test_unknown_ids_and_other_keys_ids_get_the_same_error(server, ann):
    first = complete(ann, PROMPT)
    turn_id = first.id.removeprefix("cmpl-")
    chat = ann.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    )
    unknown = ["cmpl-" + "0" * 32, "cmpl-x", "", f"cmpl-{turn_id[:-1]}", f"cmpl-{turn_id.upper()}x", chat.id]
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="bob", max_retries=0) as bob:
        asked = [(ann, one) for one in unknown] + [(bob, first.id)]
        for client, previous in asked:
            with pytest.raises(openai.NotFoundError) as raised:
                complete(client, [7], previous=previous)
            assert (raised.value.code, raised.value.param) == (
                "previous_response_not_found",
                "previous_response_id",
            )
            assert raised.value.body["message"] == f"There is no response {previous!r} to continue from."
    assert complete(ann, [7], previous=first.id).usage.prompt_tokens > 1
