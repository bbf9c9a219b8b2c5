"""Programs of smolagents.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import smolagents
import trial
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent
from trial import check, program


@smolagents.tool
def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: its name.
    """
    return trial.get_weather(city)


def model() -> OpenAIServerModel:
    return OpenAIServerModel(model_id=trial.model(), api_base=trial.url(), api_key=trial.NO_KEY)


@program("first", "CodeAgent")
def code() -> None:
    found = CodeAgent(tools=[get_weather], model=model(), max_steps=3).run(trial.ASK_WEATHER)
    trial.check_weather(str(found))


@program("other", "model call")
def call() -> None:
    check(model()([{"role": "user", "content": trial.HELLO}]).content, "no text")


@program("tool", "ToolCallingAgent")
def tool() -> None:
    found = ToolCallingAgent(tools=[get_weather], model=model(), max_steps=3).run(trial.ASK_WEATHER)
    trial.check_weather(str(found))


if __name__ == "__main__":
    trial.main()
