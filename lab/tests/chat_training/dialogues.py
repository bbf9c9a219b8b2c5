"""Dialogues for the tests of the chat model's training."""

import json

from pensieve_lab.chat_training.data import Conversation, Exchange

FOODS = ("pizza", "sushi", "curry", "tacos", "soup", "salad")
VOCAB_SIZE = 400


def dialogue(number: int, num_exchanges: int = 5) -> Conversation:
    foods = [FOODS[(number + i) % len(FOODS)] for i in range(num_exchanges)]
    return Conversation(
        tuple(Exchange(f"Can you find me some {food}, please?", f"I found {food} nearby.") for food in foods)
    )


def write_dialogues(path, dialogues, speaker="S"):
    lines = [
        {"turns": [turn for user, reply in one.exchanges for turn in (["U", user], [speaker, reply])]}
        for one in dialogues
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
