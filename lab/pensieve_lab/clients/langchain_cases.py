"""Cases for langchain-openai, run by an interpreter that has it; prints the outcomes as one line of JSON.

    python -m pensieve_lab.clients.langchain_cases http://127.0.0.1:8000/v1

Owns: the cases.
Does not know: this project, whose packages that interpreter need not have.
Called by `clients.other_programs`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

FIRST = "Hi! My name is Ada. I am looking for a place to eat in San Jose. " * 3


def model(url: str, **options: Any) -> ChatOpenAI:
    """Return a chat model of the server, with greedy sampling."""
    fixed = {"model": "chat", "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 24}
    return ChatOpenAI(base_url=url, stream_usage=True, **fixed | options)


def streamed(llm: ChatOpenAI, messages: list[Any]) -> Any:
    """Return a streamed reply, assembled from its chunks."""
    whole = None
    for piece in llm.stream(messages):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    return whole


def ask(llm: ChatOpenAI, messages: list[Any]) -> Any:
    """Return a reply that is not streamed."""
    return llm.invoke(messages)


def conversation(llm: ChatOpenAI, answer: Callable[[ChatOpenAI, list[Any]], Any], past: list[Any]) -> None:
    """Run three turns. Each reuses all of the previous one but the last token, which was not computed."""
    messages = [*past, HumanMessage(FIRST)]
    reply = answer(llm, messages)
    for asked in ("What is my name?", "And where am I?"):
        total = reply.usage_metadata["total_tokens"]
        messages += [AIMessage(reply.content, response_metadata=reply.response_metadata), HumanMessage(asked)]
        reply = answer(llm, messages)
        found = reply.usage_metadata["input_token_details"]["cache_read"]
        assert found == total - 1, f"{found} tokens found of {total}"


RESPONSES = {"use_responses_api": True, "output_version": "responses/v1"}
BY_ID = RESPONSES | {"use_previous_response_id": True}


def cases(url: str) -> dict[str, Callable[[], None]]:
    """Return all cases by name."""
    kind = SystemMessage("Be kind.")

    def batch() -> None:
        replies = model(url).batch([[HumanMessage(f"Hello {i}.")] for i in range(4)])
        assert len(replies) == 4 and all(reply.content for reply in replies)

    def asynchronous() -> None:
        async def run() -> str:
            return "".join([str(piece.text) async for piece in model(url).astream([HumanMessage("Hi!")])])

        assert asyncio.run(run())

    return {
        "use_previous_response_id: invoke finds the state": lambda: conversation(
            model(url, **BY_ID), ask, []
        ),
        "use_previous_response_id: stream finds the state": lambda: conversation(
            model(url, **BY_ID), streamed, []
        ),
        "Responses, history sent again: invoke finds the state": lambda: conversation(
            model(url, **RESPONSES), ask, [kind]
        ),
        "Chat, history sent again: invoke finds the state": lambda: conversation(model(url), ask, [kind]),
        "Chat, history sent again: stream finds the state": lambda: conversation(
            model(url), streamed, [SystemMessage("Be brief.")]
        ),
        "batch of four": batch,
        "astream": asynchronous,
    }


def main() -> None:
    """Run all cases and print their outcomes."""
    problems: dict[str, str | None] = {}
    for name, run in cases(sys.argv[1]).items():
        try:
            run()
        except Exception as error:  # any exception of langchain is the outcome of this case
            problems[name] = f"{type(error).__name__}: {error}"
        else:
            problems[name] = None
    versions = {name: importlib.metadata.version(name) for name in ("langchain-openai", "langchain-core")}
    print(json.dumps({"versions": versions, "problems": problems}))


if __name__ == "__main__":
    main()
