"""Client test cases for Chat Completions, Completions and Models: every call that this server has.

Owns: the cases.
Does not know: how they are run.
Called by `programs.check_clients`.
"""

from __future__ import annotations

from typing import Any

import openai

from pensieve_lab.clients.cases import CHAT, MODEL, case, refused
from pensieve_lab.clients.response_cases import LONG, state_of

CHATS, COMPLETIONS, MODELS = "chat completions", "completions", "models"
HELLO = [{"role": "user", "content": "Hello"}]


@case(CHATS, "create")
async def create(client: Any) -> None:
    made = await client.chat.completions.create(**CHAT, messages=HELLO)
    assert made.choices[0].message.content and made.choices[0].finish_reason in ("stop", "length")


@case(CHATS, "resent messages reuse the KV cache")
async def sent_again(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Once more. {LONG}"}]
    first = await client.chat.completions.create(**CHAT, messages=messages)
    messages += [first.choices[0].message.to_dict(), {"role": "user", "content": "And?"}]
    second = await client.chat.completions.create(**CHAT, messages=messages)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert state_of(second.usage)["recomputed_tokens"] == 0


@case(CHATS, "an edited message starts a branch")
async def edited(client: Any) -> None:
    messages = [{"role": "user", "content": f"One more. {LONG}"}]
    first = await client.chat.completions.create(**CHAT, messages=messages)
    messages += [first.choices[0].message.to_dict()]
    for asked in ("And?", "But?"):
        again = await client.chat.completions.create(
            **CHAT, messages=[*messages, {"role": "user", "content": asked}]
        )
        # The branch reuses all full chunks of 32 tokens.
        assert again.usage.prompt_tokens_details.cached_tokens > first.usage.total_tokens - 33


@case(CHATS, "n=3")
async def several(client: Any) -> None:
    made = await client.chat.completions.create(**CHAT, messages=HELLO, n=3, seed=1)
    assert [choice.index for choice in made.choices] == [0, 1, 2]


@case(CHATS, "stream, with usage")
async def streamed(client: Any) -> None:
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **CHAT, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens > 0


@case(CHATS, "stream(): the client's own helper")
async def helper(client: Any) -> None:
    async with client.chat.completions.stream(**CHAT, messages=HELLO) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content


@case(CHATS, "logprobs, whole and streamed")
async def logprobs(client: Any) -> None:
    asked = {**CHAT, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**asked)
    found = whole.choices[0].logprobs.content
    assert len(found[0].top_logprobs) == 2
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    tokens = [
        one.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert tokens == [one.token for one in found]


@case(CHATS, "stop, seed, top_p and max_completion_tokens")
async def sampled(client: Any) -> None:
    asked = {"model": MODEL, "messages": HELLO, "seed": 5, "top_p": 0.9, "max_completion_tokens": 9}
    first, again = [await client.chat.completions.create(**asked, stop=["\n"]) for _ in range(2)]
    assert first.choices[0].message.content == again.choices[0].message.content


@case(CHATS, "tools", is_refusal=True)
async def tools(client: Any) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    await refused(
        "unsupported_parameter",
        "tools",
        client.chat.completions.create,
        **CHAT,
        messages=HELLO,
        tools=offered,
    )


@case(CHATS, "audio", is_refusal=True)
async def audio(client: Any) -> None:
    await refused(
        "unsupported_parameter",
        "modalities",
        client.chat.completions.create,
        **CHAT,
        messages=HELLO,
        modalities=["audio"],
    )


@case(CHATS, "reasoning effort")
async def reasoning_effort(client: Any) -> None:
    """The model's template has none, so that the answer is the one without it."""
    answers = [
        await client.chat.completions.create(**CHAT, messages=HELLO, **fields)
        for fields in ({}, {"reasoning_effort": "high"})
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@case(CHATS, "images", is_refusal=True)
async def images(client: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    await refused(
        "unsupported_parameter",
        "messages[0].content[0].image_url",
        client.chat.completions.create,
        **CHAT,
        messages=[{"role": "user", "content": [part]}],
    )


@case(COMPLETIONS, "create with logprobs: text, token ids, several prompts")
async def completed(client: Any) -> None:
    for prompt, num_choices in (("Hello", 1), ([5, 6, 7], 1), (["Hello", "Hi"], 2)):
        made = await client.completions.create(**CHAT, prompt=prompt, logprobs=1)
        assert len(made.choices) == num_choices and made.choices[0].logprobs.tokens


@case(COMPLETIONS, "stream")
async def completed_stream(client: Any) -> None:
    # The client's chunk type allows no null finish_reason, but OpenAI sends null in all chunks but the last.
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as lenient:
        stream = await lenient.completions.create(**CHAT, prompt="Hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream])


@case(COMPLETIONS, "previous_response_id and return_token_ids in extra_body")
async def continued(client: Any) -> None:
    first = await client.completions.create(
        **CHAT, prompt=LONG, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    assert len(first.choices[0].to_dict()["token_ids"]) == first.usage.completion_tokens == 12
    second = await client.completions.create(
        **CHAT, prompt=[5], extra_body={"previous_response_id": first.id}
    )
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


@case(COMPLETIONS, "echo with logprobs")
async def echoed(client: Any) -> None:
    # The client's type of columns allows no null, but OpenAI sends null for the first token.
    asked = {**CHAT, "max_tokens": 0, "prompt": "Hello you", "echo": True, "logprobs": 2}
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as lenient:
        made = await lenient.completions.create(**asked)
    columns = made.choices[0].logprobs
    assert made.choices[0].text == "Hello you" and made.usage.completion_tokens == 0
    assert columns.token_logprobs[0] is None and None not in columns.token_logprobs[1:]
    assert len(columns.tokens) == len(columns.text_offset) == made.usage.prompt_tokens


@case(COMPLETIONS, "suffix and best_of", is_refusal=True)
async def refused_options(client: Any) -> None:
    for name, value in (("suffix", "x"), ("best_of", 2)):
        await refused(
            "unsupported_parameter", name, client.completions.create, **CHAT, prompt="Hello", **{name: value}
        )


@case(MODELS, "list and retrieve")
async def models(client: Any) -> None:
    listed = [one async for one in client.models.list()]
    assert [one.id for one in listed] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


@case(MODELS, "a model that is not served")
async def other_model(client: Any) -> None:
    await refused(
        "model_not_found",
        "model",
        client.chat.completions.create,
        **CHAT | {"model": "gpt-4o"},
        messages=HELLO,
    )


@case("other routes", "embeddings, images, files, fine-tuning", is_refusal=True)
async def other_routes(client: Any) -> None:
    embedded = {"model": MODEL, "input": "x", "encoding_format": "float"}
    await refused("unknown_url", None, client.embeddings.create, **embedded)
    await refused("unknown_url", None, client.images.generate, prompt="x")
    await refused("unknown_url", None, client.files.retrieve, file_id="x")
    await refused("unknown_url", None, client.fine_tuning.jobs.retrieve, fine_tuning_job_id="x")
