"""Programs of the anthropic package.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

from typing import Any

import anthropic
import trial
from trial import check, program

TOOL = {
    "name": "get_weather",
    "description": "Return the weather in a city.",
    "input_schema": trial.WEATHER_TOOL["function"]["parameters"],
}


def ask(question: Any, **options: Any) -> Any:
    client = anthropic.Anthropic(
        base_url=trial.url().removesuffix("/v1"), api_key=trial.NO_KEY, max_retries=0
    )
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    call = client.messages.stream if options.pop("streamed", False) else client.messages.create
    return call(model=trial.model(), max_tokens=128, messages=messages, **options)


@program("first", "messages.create")
def hello() -> None:
    check(ask(trial.HELLO).content[0].text, "no text")


@program("turns", "messages sent again")
def turns() -> None:
    first = ask(trial.NAME)
    messages = [
        {"role": "user", "content": trial.NAME},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": trial.ASK_NAME},
    ]
    answer = ask(messages, system="Be brief.").content[0].text
    check("Ada" in answer, answer)


@program("stream", "messages.stream")
def stream() -> None:
    with ask(trial.HELLO, streamed=True) as found:
        check("".join(found.text_stream), "no text")


@program("other", "count_tokens")
def count() -> None:
    client = anthropic.Anthropic(
        base_url=trial.url().removesuffix("/v1"), api_key=trial.NO_KEY, max_retries=0
    )
    messages = [{"role": "user", "content": trial.HELLO}]
    check(client.messages.count_tokens(model=trial.model(), messages=messages).input_tokens > 0, "none")


def _loop(**options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": trial.ASK_WEATHER}]
    first = ask(messages, tools=[TOOL], **options)
    uses = [block for block in first.content if block.type == "tool_use"]
    check(uses and first.stop_reason == "tool_use", first)
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": trial.get_weather(**use.input)}
        for use in uses
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    return ask(messages, tools=[TOOL])


@program("tool", "tool_choice auto")
def tool() -> None:
    trial.check_weather(_loop().content[0].text)


@program("tool", "tool_choice any")
def any_tool() -> None:
    trial.check_weather(_loop(tool_choice={"type": "any"}).content[0].text)


@program("tool", "tool_choice tool")
def named_tool() -> None:
    trial.check_weather(_loop(tool_choice={"type": "tool", "name": "get_weather"}).content[0].text)


@program("tool", "messages.stream")
def tool_stream() -> None:
    with ask(trial.ASK_WEATHER, tools=[TOOL], streamed=True) as found:
        kinds = [event.type for event in found]
        final = found.get_final_message()
    check(final.content[-1].input == {"city": "Paris"}, (kinds, final))


if __name__ == "__main__":
    trial.main()
