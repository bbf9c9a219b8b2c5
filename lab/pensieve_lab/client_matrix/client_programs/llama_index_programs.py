"""Programs of llama-index.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import trial
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from trial import check, program


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def llm(**options: object) -> OpenAILike:
    fixed = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 8192,
        "max_retries": 0,
    }
    return OpenAILike(model=trial.model(), api_base=trial.url(), api_key=trial.NO_KEY, **{**fixed, **options})


@program("first", "complete")
def hello() -> None:
    check(llm().complete(trial.HELLO).text, "no text")


@program("turns", "SimpleChatEngine")
def turns() -> None:
    engine = SimpleChatEngine.from_defaults(llm=llm())
    engine.chat(trial.NAME)
    answer = engine.chat(trial.ASK_NAME).response
    check("Ada" in answer, answer)


@program("stream", "stream_chat")
def stream() -> None:
    pieces = [one.delta or "" for one in llm().stream_chat([ChatMessage(role="user", content=trial.HELLO)])]
    check("".join(pieces), pieces)


@program("tool", "predict_and_call")
def call() -> None:
    tool = FunctionTool.from_defaults(fn=trial.get_weather)
    answer = llm().predict_and_call([tool], user_msg=trial.ASK_WEATHER)
    check("sunny" in str(answer), answer)


@program("tool", "FunctionAgent")
async def agent() -> None:
    found = FunctionAgent(tools=[trial.get_weather], llm=llm(), system_prompt="Be brief.")
    trial.check_weather(str(await found.run(trial.ASK_WEATHER)))


@program("structured", "structured_predict by a tool")
def structured() -> None:
    answer = llm().as_structured_llm(City).complete(trial.FACTS)
    check(isinstance(answer.raw, City), answer)


@program("structured", "should_use_structured_outputs")
def json_schema() -> None:
    answer = llm(should_use_structured_outputs=True).as_structured_llm(City).complete(trial.FACTS)
    check(isinstance(answer.raw, City), answer)


@program("first", "OpenAIResponses")
def responses() -> None:
    found = OpenAIResponses(
        model=trial.model(), api_base=trial.url(), api_key=trial.NO_KEY, context_window=8192, max_retries=0
    )
    check(found.complete(trial.HELLO).text, "no text")


if __name__ == "__main__":
    trial.main()
