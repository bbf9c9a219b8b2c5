"""Programs of pydantic-ai.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import trial
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from trial import check, program


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def _provider() -> OpenAIProvider:
    return OpenAIProvider(base_url=trial.url(), api_key=trial.NO_KEY)


def chat() -> OpenAIChatModel:
    return OpenAIChatModel(trial.model(), provider=_provider())


def responses() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(trial.model(), provider=_provider())


@program("first", "run_sync")
def hello() -> None:
    check(Agent(chat()).run_sync(trial.HELLO).output, "no text")


@program("turns", "message_history")
def turns() -> None:
    agent = Agent(chat())
    first = agent.run_sync(trial.NAME)
    second = agent.run_sync(trial.ASK_NAME, message_history=first.all_messages())
    check("Ada" in second.output, second.output)


@program("stream", "run_stream")
async def stream() -> None:
    async with Agent(chat()).run_stream(trial.HELLO) as result:
        check(await result.get_output(), "no text")


@program("tool", "Chat Completions")
def tool() -> None:
    trial.check_weather(Agent(chat(), tools=[trial.get_weather]).run_sync(trial.ASK_WEATHER).output)


@program("tool", "Responses")
def responses_tool() -> None:
    trial.check_weather(Agent(responses(), tools=[trial.get_weather]).run_sync(trial.ASK_WEATHER).output)


@program("tool", "run_stream")
async def tool_stream() -> None:
    async with Agent(chat(), tools=[trial.get_weather]).run_stream(trial.ASK_WEATHER) as result:
        trial.check_weather(await result.get_output())


@program("structured", "output_type, by a tool")
def tool_output() -> None:
    check(isinstance(Agent(chat(), output_type=City).run_sync(trial.FACTS).output, City), "no City")


@program("structured", "NativeOutput")
def native() -> None:
    check(
        isinstance(Agent(chat(), output_type=NativeOutput(City)).run_sync(trial.FACTS).output, City), "none"
    )


@program("structured", "PromptedOutput")
def prompted() -> None:
    agent = Agent(chat(), output_type=PromptedOutput(City))
    check(isinstance(agent.run_sync(trial.FACTS).output, City), "no City")


@program("structured", "NativeOutput, Responses")
def responses_native() -> None:
    agent = Agent(responses(), output_type=NativeOutput(City))
    check(isinstance(agent.run_sync(trial.FACTS).output, City), "no City")


if __name__ == "__main__":
    trial.main()
