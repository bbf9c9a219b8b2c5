"""Programs of autogen-agentchat.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import trial
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel
from trial import check, program

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def agent(name: str = "helper", **options: object) -> AssistantAgent:
    client = OpenAIChatCompletionClient(
        model=trial.model(), base_url=trial.url(), api_key=trial.NO_KEY, model_info=INFO, max_retries=0
    )
    return AssistantAgent(name, model_client=client, **options)


@program("first", "AssistantAgent.run")
async def hello() -> None:
    result = await agent().run(task=trial.HELLO)
    check(result.messages[-1].content, result)


@program("stream", "run_stream")
async def stream() -> None:
    found = [one async for one in agent(model_client_stream=True).run_stream(task=trial.HELLO)]
    check(found[-1].messages[-1].content, found)


@program("turns", "team")
async def team() -> None:
    found = RoundRobinGroupChat([agent("one"), agent("two")], termination_condition=MaxMessageTermination(3))
    check(len((await found.run(task=trial.HELLO)).messages) == 3, "another number of messages")


@program("tool", "reflect_on_tool_use")
async def tool() -> None:
    found = agent(tools=[trial.get_weather], reflect_on_tool_use=True)
    result = await found.run(task=trial.ASK_WEATHER)
    trial.check_weather(str(result.messages[-1].content))


@program("structured", "output_content_type")
async def structured() -> None:
    result = await agent(output_content_type=City).run(task=trial.FACTS)
    check(isinstance(result.messages[-1].content, City), result)


if __name__ == "__main__":
    trial.main()
