"""Programs of langchain and langgraph.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

from typing import Any

import trial
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel
from trial import check, program


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def llm(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=trial.model(), base_url=trial.url(), api_key=trial.NO_KEY, max_retries=0, **options
    )


def _ask(agent: Any, question: str, **options: Any) -> Any:
    return agent.invoke({"messages": [{"role": "user", "content": question}]}, **options)


@program("first", "ChatOpenAI.invoke")
def hello() -> None:
    check(llm().invoke(trial.HELLO).content, "no text")


@program("first", "create_agent")
def plain_agent() -> None:
    check(_ask(create_agent(llm(), []), trial.HELLO)["messages"][-1].content, "no text")


@program("turns", "checkpointer")
def memory() -> None:
    agent = create_agent(llm(), [], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "one"}}
    _ask(agent, trial.NAME, config=config)
    answer = _ask(agent, trial.ASK_NAME, config=config)["messages"][-1].content
    check("Ada" in answer, answer)


@program("stream", "ChatOpenAI.stream")
def stream() -> None:
    check("".join(str(one.content) for one in llm().stream(trial.HELLO)), "no text")


@program("tool", "bind_tools")
def bind() -> None:
    answer = llm().bind_tools([trial.WEATHER_TOOL]).invoke(trial.ASK_WEATHER)
    check([one["args"] for one in answer.tool_calls] == [{"city": "Paris"}], answer)


@program("tool", "create_agent")
def agent() -> None:
    answer = _ask(create_agent(llm(), [trial.get_weather]), trial.ASK_WEATHER)
    trial.check_weather(answer["messages"][-1].content)


@program("tool", "create_agent, stream")
def agent_stream() -> None:
    found = create_agent(llm(), [trial.get_weather])
    question = {"messages": [{"role": "user", "content": trial.ASK_WEATHER}]}
    pieces = [
        str(message.content)
        for message, metadata in found.stream(question, stream_mode="messages")
        if metadata["langgraph_node"] == "model"
    ]
    trial.check_weather("".join(pieces))


@program("tool", "create_agent, Responses")
def responses_agent() -> None:
    found = create_agent(llm(use_responses_api=True), [trial.get_weather])
    trial.check_weather(_ask(found, trial.ASK_WEATHER)["messages"][-1].text)


@program("structured", "with_structured_output, json_schema")
def json_schema() -> None:
    found = llm().with_structured_output(City, method="json_schema").invoke(trial.FACTS)
    check(isinstance(found, City), found)


@program("structured", "with_structured_output, function_calling")
def function_calling() -> None:
    found = llm().with_structured_output(City, method="function_calling").invoke(trial.FACTS)
    check(isinstance(found, City), found)


@program("structured", "with_structured_output, json_mode")
def json_mode() -> None:
    found = llm().with_structured_output(City, method="json_mode").invoke(trial.FACTS)
    check(isinstance(found, City), found)


@program("structured", "create_agent, ToolStrategy")
def tool_strategy() -> None:
    found = _ask(create_agent(llm(), [], response_format=ToolStrategy(City)), trial.FACTS)
    check(isinstance(found["structured_response"], City), found)


@program("structured", "create_agent, ProviderStrategy")
def provider_strategy() -> None:
    found = _ask(create_agent(llm(), [], response_format=ProviderStrategy(City)), trial.FACTS)
    check(isinstance(found["structured_response"], City), found)


if __name__ == "__main__":
    trial.main()
