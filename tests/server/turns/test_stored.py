"""Chat Completions and Completions that are stored on request, and completions continued by ids."""

from __future__ import annotations

import openai
import pytest

TEXT = "Hi! My name is Ada. I am looking for a place to eat in San Jose."
GREEDY = {"model": "chat", "temperature": 0, "max_tokens": 6}
IDS = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def client(chat_server):
    with openai.OpenAI(base_url=f"{chat_server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, prompt, **extra):
    return client.completions.create(**GREEDY, prompt=prompt, extra_body=IDS | extra)


def test_a_completion_is_continued_by_the_sampled_ids(client):
    first = complete(client, [5, 6, 7, 8])
    second = complete(client, [9, 10], previous_response_id=first.id)
    whole = complete(client, [5, 6, 7, 8, *first.choices[0].token_ids, 9, 10])
    assert second.choices[0].token_ids == whole.choices[0].token_ids
    assert second.usage.prompt_tokens == whole.usage.prompt_tokens == 12
    assert second.usage.pensieve["new_tokens"] == 2 and second.usage.prompt_tokens_details.cached_tokens == 9


def test_two_completions_continue_one(client):
    first = complete(client, [11, 12, 13])
    again = [complete(client, [14], previous_response_id=first.id) for _ in range(2)]
    assert again[0].choices[0].token_ids == again[1].choices[0].token_ids
    assert len({one.id for one in again}) == 2


def test_the_ids_of_a_stream_equal_those_of_the_whole_answer(client):
    whole = complete(client, [21, 22, 23]).choices[0].token_ids
    stream = client.completions.create(**GREEDY, prompt=[21, 22, 23], stream=True, extra_body=IDS)
    told = [getattr(one, "token_ids", ()) for chunk in stream for one in chunk.choices]
    assert [token for ids in told for token in ids] == whole


def test_text_behind_a_completion_has_no_beginning_token(client):
    first = complete(client, TEXT)
    second = complete(client, " And", previous_response_id=first.id)
    assert second.usage.pensieve["new_tokens"] == 1
    assert second.usage.prompt_tokens == first.usage.total_tokens + 1


@pytest.mark.parametrize("unknown", ["cmpl-" + "0" * 32, "nonsense", ""])
def test_an_unknown_previous_completion_is_refused(client, unknown):
    with pytest.raises(openai.NotFoundError) as refused:
        complete(client, [5], previous_response_id=unknown)
    assert refused.value.code == "previous_response_not_found"


def test_several_prompts_cannot_continue_one_completion(client):
    first = complete(client, [5])
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, [[5], [6]], previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


def test_an_unstored_completion_is_not_a_response(client):
    first = complete(client, [5])
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id.replace("cmpl-", "resp_"))


def test_a_stored_completion_is_a_response(client):
    kept = complete(client, TEXT, store=True)
    found = client.responses.retrieve(kept.id.replace("cmpl-", "resp_"))
    assert found.output_text == kept.choices[0].text and found.status == "incomplete"
    (item,) = client.responses.input_items.list(found.id).data
    assert item.content[0].text == TEXT
    client.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("prefix", ["resp_", "cmpl-"])
def test_a_deleted_completion_cannot_be_continued(client, goes_on, store, prefix):
    """This holds although its KV cache still exists, and its tokens too if another turn continues it."""
    kept = complete(client, TEXT, store=True)
    if goes_on:
        complete(client, [5], store=True, previous_response_id=kept.id)
    client.responses.delete(kept.id.replace("cmpl-", "resp_"))
    with pytest.raises(openai.NotFoundError) as refused:
        complete(client, [5], store=store, previous_response_id=kept.id.replace("cmpl-", prefix))
    assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("prefix", ["resp_", "cmpl-", "chatcmpl-", ""])
def test_an_unstored_response_cannot_be_named(client, prefix):
    response = client.responses.create(model="chat", temperature=0, input=TEXT, store=False)
    with pytest.raises(openai.NotFoundError) as refused:
        complete(client, [5], previous_response_id=response.id.replace("resp_", prefix))
    assert refused.value.code == "previous_response_not_found"


def test_a_completion_continues_a_stored_response(client):
    response = client.responses.create(model="chat", temperature=0, input=TEXT)
    found = complete(client, [5], previous_response_id=response.id)
    assert found.usage.pensieve["new_tokens"] == 1 and found.usage.prompt_tokens > 20


def test_a_stored_chat_is_a_response_that_can_be_continued(client):
    chat = client.chat.completions.create(
        model="chat", temperature=0, messages=[{"role": "user", "content": TEXT}], store=True
    )
    response_id = chat.id.replace("chatcmpl-", "resp_")
    assert client.responses.retrieve(response_id).output_text == chat.choices[0].message.content
    named = client.responses.create(
        model="chat", temperature=0, input="What is my name?", previous_response_id=response_id
    )
    assert "Ada" in named.output_text and named.usage.input_tokens_details.cached_tokens > 20


def test_each_choice_of_a_stored_chat_is_a_response(client):
    chat = client.chat.completions.create(
        model="chat", seed=3, temperature=1, n=2, messages=[{"role": "user", "content": TEXT}], store=True
    )
    first = client.responses.retrieve(chat.id.replace("chatcmpl-", "resp_"))
    assert first.output_text == chat.choices[0].message.content
