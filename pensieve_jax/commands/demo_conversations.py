"""Conversations of the demonstration.

Owns: the system prompt, every user message, and the fact that the last reply should contain.
Does not know: the engine, or the replies of the model.

Each user tells a fact in the first turn and asks for it in the last one. Half of the conversations are
greedy, half are sampled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pensieve_jax import SamplingParams

SYSTEM_PROMPT: Final = (
    "You are a friendly assistant who answers in short sentences. You help people with restaurants, music, "
    "travel and appointments. Answer briefly, and remember what the user tells you."
)
_GREEDY: Final = SamplingParams(max_tokens=56)
_SAMPLED: Final = SamplingParams(max_tokens=56, temperature=0.6, top_p=0.9, seed=7)


class Script(NamedTuple):
    """User messages of one conversation, its sampling parameters, and the fact told in its first message."""

    params: SamplingParams
    fact: str
    messages: tuple[str, ...]


CONVERSATIONS: Final[dict[str, Script]] = {
    "ada": Script(
        _GREEDY,
        "Ada",
        (
            "Hi! My name is Ada. I am looking for a place to eat in San Jose.",
            "I would like some Italian food, please.",
            "That sounds good. Can you reserve a table?",
            "At 7 pm, for two people.",
            "Yes, that is right. What is their phone number?",
            "Thanks! By the way, what is my name?",
        ),
    ),
    "boris": Script(
        _SAMPLED,
        "Vienna",
        (
            "Hello. I live in Vienna. Can you find me some music?",
            "I want to hear some rock.",
            "Which album is it from?",
            "Great, please play it in the kitchen.",
            "Yes, that is correct.",
            "One more thing: where do I live?",
        ),
    ),
    "chen": Script(
        _GREEDY,
        "Pixel",
        (
            "Good morning. My dog is called Pixel. I need a one way flight to New York.",
            "I am leaving from Chicago on the 8th of March.",
            "Is the ticket refundable?",
            "That works for me. Please book it.",
            "Yes, that is right.",
            "Sorry, what is my dog's name?",
        ),
    ),
    "dora": Script(
        _SAMPLED,
        "10:30 am",
        (
            "Hi there. My meeting starts at 10:30 am. What will the weather be like in Berkeley on that day?",
            "It is on the 5th of March.",
            "How strong is the wind?",
            "Thank you. I also need a hair salon in Berkeley.",
            "Is it for women, too?",
            "Quick question: when is my meeting?",
        ),
    ),
    "emil": Script(
        _GREEDY,
        "Greta",
        (
            "Hello. I have a sister called Greta. We want to see a movie in Oakland.",
            "A comedy would be nice.",
            "When is it shown?",
            "Please get two tickets for tomorrow evening.",
            "Yes, please.",
            "Tell me, what is my sister called?",
        ),
    ),
    "fay": Script(
        _SAMPLED,
        "4071",
        (
            "Hi! My room number is 4071. I need a bus from Sacramento to Los Angeles.",
            "I want to travel on March 3rd.",
            "How long does it take?",
            "Then I will take two seats.",
            "Yes, that is all right.",
            "Okay, what is my room number?",
        ),
    ),
    "gus": Script(
        _GREEDY,
        "Harbour Street",
        (
            "Hello! I parked my car on Harbour Street. Now I need a hotel in Paris.",
            "Does it have a pool?",
            "Okay, please reserve one room.",
            "From the 10th of March to the 12th.",
            "Yes, that is correct.",
            "Before we go on, where is my car?",
        ),
    ),
    "hana": Script(
        _SAMPLED,
        "Miro",
        (
            "Good evening! My cat is called Miro. I am looking for a dentist in Fremont.",
            "What is the address?",
            "Can I have an appointment on the 6th of March?",
            "In the morning, at 11, please.",
            "Yes, that suits me.",
            "Thanks! What is the name of my cat?",
        ),
    ),
}
