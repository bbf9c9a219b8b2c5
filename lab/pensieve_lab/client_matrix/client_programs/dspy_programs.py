"""Programs of dspy.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import dspy
import trial
from trial import check, program

QUESTION = "Which city is the capital of France?"


def lm() -> dspy.LM:
    found = dspy.LM(
        f"openai/{trial.model()}", api_base=trial.url(), api_key=trial.NO_KEY, cache=False, num_retries=0
    )
    dspy.configure(lm=found)
    return found


@program("first", "Predict")
def predict() -> None:
    lm()
    check(dspy.Predict("question -> answer")(question=QUESTION).answer == "Paris", "another answer")


@program("other", "lm()")
def plain() -> None:
    check(lm()(trial.HELLO)[0], "no text")


@program("other", "ChainOfThought")
def chain() -> None:
    lm()
    check(dspy.ChainOfThought("question -> answer")(question=QUESTION).answer == "Paris", "another answer")


@program("structured", "typed output, JSONAdapter")
def typed() -> None:
    found = lm()
    with dspy.context(lm=found, adapter=dspy.JSONAdapter()):
        result = dspy.Predict("facts -> name: str, population: int")(facts=trial.FACTS)
    check(isinstance(result.population, int), result)


@program("tool", "ReAct")
def react() -> None:
    lm()
    result = dspy.ReAct("question -> answer", tools=[trial.get_weather], max_iters=3)(
        question=trial.ASK_WEATHER
    )
    trial.check_weather(result.answer)


if __name__ == "__main__":
    trial.main()
