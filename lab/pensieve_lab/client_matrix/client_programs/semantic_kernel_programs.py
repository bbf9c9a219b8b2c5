"""Programs of semantic-kernel.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

from typing import Any

import openai
import trial
from pydantic import BaseModel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function
from trial import check, program


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


class Weather:
    """Plugin with one function."""

    @kernel_function(description="Return the weather in a city.")
    def get_weather(self, city: str) -> str:
        return trial.get_weather(city)


def agent(**options: Any) -> ChatCompletionAgent:
    client = openai.AsyncOpenAI(base_url=trial.url(), api_key=trial.NO_KEY, max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=trial.model(), async_client=client)
    return ChatCompletionAgent(service=service, name="Helper", instructions="Be brief.", **options)


@program("first", "get_response")
async def hello() -> None:
    check(str(await agent().get_response(messages=trial.HELLO)), "no text")


@program("turns", "thread")
async def turns() -> None:
    found = agent()
    first = await found.get_response(messages=trial.NAME)
    second = await found.get_response(messages=trial.ASK_NAME, thread=first.thread)
    check("Ada" in str(second), second)


@program("stream", "invoke_stream")
async def stream() -> None:
    check("".join([str(one) async for one in agent().invoke_stream(messages=trial.HELLO)]), "no text")


@program("tool", "plugin")
async def plugin() -> None:
    trial.check_weather(str(await agent(plugins=[Weather()]).get_response(messages=trial.ASK_WEATHER)))


@program("structured", "response_format")
async def structured() -> None:
    settings = OpenAIChatPromptExecutionSettings(response_format=City)
    answer = await agent(arguments=KernelArguments(settings=settings)).get_response(messages=trial.FACTS)
    check(City.model_validate_json(str(answer)), answer)


if __name__ == "__main__":
    trial.main()
