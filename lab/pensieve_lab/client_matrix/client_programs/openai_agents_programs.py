"""Programs of the openai-agents package.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import agents
import trial
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from trial import check, program

agents.set_tracing_disabled(True)


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


@agents.function_tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return trial.get_weather(city)


def _client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=trial.url(), api_key=trial.NO_KEY, max_retries=0)


def agent(*, chat: bool = False, **options: object) -> Agent:
    kind = OpenAIChatCompletionsModel if chat else OpenAIResponsesModel
    found = kind(model=trial.model(), openai_client=_client())
    return Agent(name="Helper", instructions="Be brief.", model=found, **options)


@program("first", "Runner.run")
async def hello() -> None:
    check((await Runner.run(agent(), trial.HELLO)).final_output, "no text")


@program("turns", "to_input_list")
async def turns() -> None:
    first = await Runner.run(agent(), trial.NAME)
    items = [*first.to_input_list(), {"role": "user", "content": trial.ASK_NAME}]
    second = await Runner.run(agent(), items)
    check("Ada" in second.final_output, second.final_output)


@program("turns", "SQLiteSession")
async def session() -> None:
    kept = SQLiteSession("one")
    await Runner.run(agent(), trial.NAME, session=kept)
    second = await Runner.run(agent(), trial.ASK_NAME, session=kept)
    check("Ada" in second.final_output, second.final_output)


@program("stream", "run_streamed")
async def stream() -> None:
    result = Runner.run_streamed(agent(), trial.HELLO)
    kinds = [event.type async for event in result.stream_events()]
    check(result.final_output, kinds)


@program("tool", "Responses")
async def tool() -> None:
    trial.check_weather((await Runner.run(agent(tools=[get_weather]), trial.ASK_WEATHER)).final_output)


@program("tool", "Chat Completions")
async def chat_tool() -> None:
    result = await Runner.run(agent(chat=True, tools=[get_weather]), trial.ASK_WEATHER)
    trial.check_weather(result.final_output)


@program("tool", "run_streamed")
async def tool_stream() -> None:
    result = Runner.run_streamed(agent(tools=[get_weather]), trial.ASK_WEATHER)
    async for _ in result.stream_events():
        pass
    trial.check_weather(result.final_output)


@program("tool", "required")
async def required() -> None:
    settings = ModelSettings(tool_choice="required")
    result = await Runner.run(agent(tools=[get_weather], model_settings=settings), trial.ASK_WEATHER)
    trial.check_weather(result.final_output)


@program("tool", "handoff")
async def handoff() -> None:
    expert = agent()
    expert.name = "Expert"
    first = agent(handoffs=[expert])
    result = await Runner.run(first, "Hand this over to the expert.")
    check(result.last_agent.name == "Expert", result.last_agent.name)


@program("structured", "output_type, Responses")
async def structured() -> None:
    result = await Runner.run(agent(output_type=City), trial.FACTS)
    check(isinstance(result.final_output, City), result.final_output)


@program("structured", "output_type, Chat Completions")
async def chat_structured() -> None:
    result = await Runner.run(agent(chat=True, output_type=City), trial.FACTS)
    check(isinstance(result.final_output, City), result.final_output)


if __name__ == "__main__":
    trial.main()
