"""Programs of litellm's SDK.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import json
from typing import Any

import litellm
import trial
from pydantic import BaseModel
from trial import check, program

litellm.telemetry = False


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def ask(messages: Any, provider: str = "openai", **options: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return litellm.completion(
        model=f"{provider}/{trial.model()}",
        messages=messages,
        api_base=trial.url(),
        api_key=trial.NO_KEY,
        num_retries=0,
        **options,
    )


@program("first", "completion")
def hello() -> None:
    check(ask(trial.HELLO).choices[0].message.content, "no text")


@program("stream", "completion")
def stream() -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(trial.HELLO, stream=True)]
    check("".join(pieces), pieces)


@program("first", "hosted_vllm")
def hosted() -> None:
    check(ask(trial.HELLO, "hosted_vllm").choices[0].message.content, "no text")


@program("other", "frequency_penalty and presence_penalty")
def penalties() -> None:
    check(ask(trial.HELLO, frequency_penalty=0.5, presence_penalty=0.5).choices[0].message.content, "no text")


def _tool(provider: str) -> None:
    messages = [{"role": "user", "content": trial.ASK_WEATHER}]
    first = ask(messages, provider, tools=[trial.WEATHER_TOOL]).choices[0].message
    check(first.tool_calls, first)
    messages.append(first)
    for call in first.tool_calls:
        result = trial.get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    trial.check_weather(ask(messages, provider, tools=[trial.WEATHER_TOOL]).choices[0].message.content)


@program("tool", "openai")
def tool() -> None:
    _tool("openai")


@program("tool", "hosted_vllm")
def hosted_tool() -> None:
    _tool("hosted_vllm")


@program("structured", "response_format")
def structured() -> None:
    content = ask(trial.FACTS, response_format=City).choices[0].message.content
    check(City.model_validate_json(content), content)


@program("structured", "json_object")
def json_object() -> None:
    content = ask(trial.FACTS, response_format={"type": "json_object"}).choices[0].message.content
    check(isinstance(json.loads(content), dict), content)


@program("other", "anthropic adapter")
async def anthropic_adapter() -> None:
    answer = await litellm.anthropic.messages.acreate(
        model=f"openai/{trial.model()}",
        messages=[{"role": "user", "content": trial.HELLO}],
        max_tokens=64,
        api_base=trial.url(),
        api_key=trial.NO_KEY,
    )
    check(answer["content"], answer)


if __name__ == "__main__":
    trial.main()
