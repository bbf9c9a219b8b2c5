"""Programs of the openai package.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import trial
from pydantic import BaseModel
from trial import check, program

RESPONSES_TOOL = {"type": "function", **trial.WEATHER_TOOL["function"], "strict": True}


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=trial.url(), api_key=trial.NO_KEY, max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@program("first", "responses.create")
def hello() -> None:
    check(client().responses.create(model=trial.model(), input=trial.HELLO).output_text, "no text")


@program("first", "chat.completions.create")
def chat() -> None:
    answer = client().chat.completions.create(model=trial.model(), messages=user(trial.HELLO))
    check(answer.choices[0].message.content, answer)


@program("turns", "previous_response_id")
def by_id() -> None:
    first = client().responses.create(model=trial.model(), input=trial.NAME)
    second = client().responses.create(
        model=trial.model(), input=trial.ASK_NAME, previous_response_id=first.id
    )
    check("Ada" in second.output_text, second.output_text)


@program("turns", "messages sent again")
def again() -> None:
    messages = user(trial.NAME)
    first = client().chat.completions.create(model=trial.model(), messages=messages)
    messages += [first.choices[0].message, *user(trial.ASK_NAME)]
    answer = client().chat.completions.create(model=trial.model(), messages=messages)
    check("Ada" in (answer.choices[0].message.content or ""), answer)


@program("stream", "chat")
def chat_stream() -> None:
    stream = client().chat.completions.create(
        model=trial.model(), messages=user(trial.HELLO), stream=True, stream_options={"include_usage": True}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    check(text, "no text")


@program("stream", "responses")
def responses_stream() -> None:
    with client().responses.stream(model=trial.model(), input=trial.HELLO) as stream:
        kinds = [event.type for event in stream]
        check(stream.get_final_response().output_text, kinds)


def _tool_loop(**options: Any) -> Any:
    """Run a chat with the tool until the model answers in words."""
    messages = user(options.pop("question", trial.ASK_WEATHER))
    for _ in range(4):
        answer = client().chat.completions.create(
            model=trial.model(), messages=messages, tools=[trial.WEATHER_TOOL], **options
        )
        options.pop("tool_choice", None)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message
        check(answer.choices[0].finish_reason in ("tool_calls", "stop"), answer)
        for call in message.tool_calls:
            result = trial.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("calls never end")


@program("tool", "chat, tool_choice auto")
def tool() -> None:
    trial.check_weather(_tool_loop().content or "")


@program("tool", "chat, two calls at once")
def two_calls() -> None:
    trial.check_weather(_tool_loop(question=trial.ASK_TWO).content or "", "Paris", "Rome")


@program("tool", "chat, tool_choice required")
def required() -> None:
    trial.check_weather(_tool_loop(tool_choice="required").content or "")


@program("tool", "chat, named tool")
def named() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    trial.check_weather(_tool_loop(tool_choice=choice).content or "")


@program("tool", "chat, tool_choice none")
def none() -> None:
    message = _tool_loop(tool_choice="none")
    check(message.content and not message.tool_calls, message)


@program("tool", "chat, stream of deltas")
def tool_stream() -> None:
    stream = client().chat.completions.create(
        model=trial.model(), messages=user(trial.ASK_WEATHER), tools=[trial.WEATHER_TOOL], stream=True
    )
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason = None
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    names[call.index] = call.function.name
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    check(names == {0: "get_weather"} and json.loads(arguments[0]) == {"city": "Paris"}, arguments)
    check(reason == "tool_calls", reason)


@program("tool", "chat.completions.stream, strict tool")
def tool_stream_helper() -> None:
    class GetWeather(BaseModel):
        """Return the weather in a city."""

        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with client().chat.completions.stream(
        model=trial.model(), messages=user(trial.ASK_WEATHER), tools=[tool]
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    check("tool_calls.function.arguments.done" in kinds, kinds)
    parsed = message.tool_calls[0].function.parsed_arguments
    check(parsed == GetWeather(city="Paris"), message)


@program("tool", "responses, previous_response_id")
def responses_tool() -> None:
    first = client().responses.create(model=trial.model(), input=trial.ASK_WEATHER, tools=[RESPONSES_TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    check(len(calls) == 1, first.output)
    result = trial.get_weather(**json.loads(calls[0].arguments))
    second = client().responses.create(
        model=trial.model(),
        input=[{"type": "function_call_output", "call_id": calls[0].call_id, "output": result}],
        previous_response_id=first.id,
        tools=[RESPONSES_TOOL],
    )
    trial.check_weather(second.output_text)


@program("tool", "responses, items sent again")
def responses_items() -> None:
    items: list[Any] = user(trial.ASK_WEATHER)
    first = client().responses.create(model=trial.model(), input=items, tools=[RESPONSES_TOOL], store=False)
    items += first.output
    for call in first.output:
        if call.type == "function_call":
            result = trial.get_weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    second = client().responses.create(model=trial.model(), input=items, tools=[RESPONSES_TOOL], store=False)
    trial.check_weather(second.output_text)


@program("tool", "responses.stream")
def responses_tool_stream() -> None:
    with client().responses.stream(
        model=trial.model(), input=trial.ASK_WEATHER, tools=[RESPONSES_TOOL]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    check("response.function_call_arguments.delta" in kinds, kinds)
    check("response.function_call_arguments.done" in kinds, kinds)
    check(json.loads(final.output[-1].arguments) == {"city": "Paris"}, final.output)


@program("structured", "chat.completions.parse")
def parse() -> None:
    answer = client().chat.completions.parse(
        model=trial.model(), messages=user(trial.FACTS), response_format=City
    )
    check(isinstance(answer.choices[0].message.parsed, City), answer)


@program("structured", "responses.parse")
def responses_parse() -> None:
    answer = client().responses.parse(model=trial.model(), input=trial.FACTS, text_format=City)
    check(isinstance(answer.output_parsed, City), answer)


@program("structured", "chat.completions.stream")
def parse_stream() -> None:
    with client().chat.completions.stream(
        model=trial.model(), messages=user(trial.FACTS), response_format=City
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    check(isinstance(message.parsed, City), (kinds, message))


@program("structured", "json_object")
def json_object() -> None:
    answer = client().chat.completions.create(
        model=trial.model(), messages=user(trial.FACTS), response_format={"type": "json_object"}
    )
    check(isinstance(json.loads(answer.choices[0].message.content or ""), dict), answer)


if __name__ == "__main__":
    trial.main()
