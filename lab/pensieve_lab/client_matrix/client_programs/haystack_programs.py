"""Programs of haystack.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

from typing import Annotated, Any

import trial
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel
from trial import check, program


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def generator(**options: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(trial.NO_KEY), model=trial.model(), api_base_url=trial.url(), **options
    )


def get_weather(city: Annotated[str, "a city"]) -> str:
    """Return the weather in a city."""
    return trial.get_weather(city)


@program("first", "OpenAIChatGenerator")
def hello() -> None:
    check(generator().run([ChatMessage.from_user(trial.HELLO)])["replies"][0].text, "no text")


@program("first", "pipeline")
def pipeline() -> None:
    found = Pipeline()
    found.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{ question }}")]))
    found.add_component("llm", generator())
    found.connect("prompt.prompt", "llm.messages")
    check(found.run({"prompt": {"question": trial.HELLO}})["llm"]["replies"][0].text, "no text")


@program("stream", "streaming_callback")
def stream() -> None:
    pieces: list[str] = []
    generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(
        [ChatMessage.from_user(trial.HELLO)]
    )
    check("".join(pieces), pieces)


@program("tool", "Agent")
def agent() -> None:
    found = Agent(chat_generator=generator(), tools=[create_tool_from_function(get_weather)])
    result = found.run(messages=[ChatMessage.from_user(trial.ASK_WEATHER)])
    trial.check_weather(result["messages"][-1].text)


@program("tool", "Agent, Responses")
def responses_agent() -> None:
    llm = OpenAIResponsesChatGenerator(
        api_key=Secret.from_token(trial.NO_KEY), model=trial.model(), api_base_url=trial.url()
    )
    found = Agent(chat_generator=llm, tools=[create_tool_from_function(get_weather)])
    result = found.run(messages=[ChatMessage.from_user(trial.ASK_WEATHER)])
    trial.check_weather(result["messages"][-1].text)


@program("structured", "response_format")
def structured() -> None:
    found = generator(generation_kwargs={"response_format": City})
    text = found.run([ChatMessage.from_user(trial.FACTS)])["replies"][0].text
    check(City.model_validate_json(text), text)


if __name__ == "__main__":
    trial.main()
