"""The chat model's training: what is told, asked and greeted, and what only the tests do."""

import random

import pytest
from chat_training.corpus import vocabulary_texts
from chat_training.frames import CLAUSE_FRAMES, QUESTION_ASKS, TOPIC_ASKS
from chat_training.kinds import KINDS
from chat_training.questions import gives_a_fact
from chat_training.recall import Role, recall_conversation
from chat_training.recall_cases import Sort, holds, recall_case, recall_cases
from chat_training.small_talk import (
    FILLERS,
    closing,
    held_out_prompts,
    opening,
    passing,
    training_exchanges,
)
from chat_training.values import is_held_out
from chat_training.wordings import Wordings, held_out_wordings, training_wordings


def test_training_never_tells_held_out_values_in_held_out_words(talks):
    rng = random.Random(1)
    hidden = [
        text for kind in KINDS for every in (kind.asks, kind.tells) for text in held_out_wordings(every)
    ]
    hidden += [text for kind in KINDS for text in (*kind.new_tells, *kind.new_asks)]
    pieces = [max(text.split("{}"), key=len).strip(" .?").lower() for text in hidden]
    talked = {exchange for talk in talks for exchange in talk.exchanges}
    replies = {exchange.reply for exchange in talked}
    num_told = 0
    for _ in range(400):
        conversation, roles = recall_conversation(rng, talks)
        told = ""
        for exchange, role in zip(conversation.exchanges, roles, strict=True):
            assert (exchange in talked) == (role is Role.TALK)
            assert (exchange.reply in replies) == (role in (Role.TALK, Role.REQUEST))
            if role is Role.SMALL_TALK:
                assert not gives_a_fact(exchange.reply) and "not told" not in exchange.reply
            elif role is not Role.TALK:
                assert not [piece for piece in pieces if len(piece) > 9 and piece in exchange.user.lower()]
                value = answered_value(exchange.reply)
                if value is not None:
                    assert holds(told, value) and not is_held_out(value) and gives_a_fact(exchange.reply)
                    num_told += 1
            told += f" {exchange.user}"
    assert num_told > 400


def answered_value(reply):
    """The value that a reply gives, or None if it gives none."""
    for template in {answer for kind in KINDS for answer in kind.answers}:
        before, _, after = template.partition("{}")
        if reply.startswith(before) and reply.endswith(after):
            return reply[len(before) : len(reply) - len(after)]
    return None


def asked_by(kind, wordings):
    return held_out_wordings(kind.asks) if wordings is Wordings.NEW_SENTENCES else kind.new_asks


def told_by(kind, wordings):
    return held_out_wordings(kind.tells) if wordings is Wordings.NEW_SENTENCES else kind.new_tells


@pytest.mark.parametrize("wordings", [Wordings.NEW_SENTENCES, Wordings.NEW_CONSTRUCTIONS])
def test_a_test_case_asks_for_a_held_out_fact_told_first(talks, wordings):
    rng = random.Random(2)
    kinds = {kind.name: kind for kind in KINDS}
    seen = set()
    for _ in range(300):
        case = recall_case(rng, talks, (3, 6), wordings)
        seen.add(case.kind)
        assert is_held_out(case.value)
        assert holds(case.history.exchanges[0].user, case.value)
        assert not holds(case.question, case.value)
        assert 4 <= len(case.history.exchanges) <= 7
        told = [text.format(case.value) for text in told_by(kinds[case.kind], wordings)]
        assert any(text in case.history.exchanges[0].user for text in told)
        asks = [text.lower() for text in asked_by(kinds[case.kind], wordings)]
        assert case.question.lower().endswith(tuple(asks))
    assert seen == kinds.keys()


def test_wordings_are_many_and_none_is_there_twice():
    for kind in KINDS:
        assert all(text.count("{}") == 1 for text in (*kind.tells, *kind.new_tells, *kind.answers))
        assert len(set(kind.new_tells)) == len(set(kind.new_asks)) == 2
        for every in (kind.tells, kind.asks):
            assert len(set(every)) == len(every) >= 9
            assert not set(held_out_wordings(every)) & set(training_wordings(every))


def test_an_answer_holds_a_value_as_words_of_its_own():
    assert holds("Your train leaves at 4:15 pm.", "4:15 pm") and holds("You are Ada.", "Ada")
    assert not holds("You are Adam.", "Ada") and not holds("It is 1402.", "140")


def test_only_answers_about_what_was_told_give_a_fact():
    assert gives_a_fact("I see. Your name is Wiu.") and gives_a_fact("I see. You are 7")
    assert gives_a_fact("Your train leaves at 4:15 pm.") and gives_a_fact("The name of your boss is loud.")
    assert not gives_a_fact("You are welcome.") and not gives_a_fact("You have not told me your name yet.")
    assert not gives_a_fact("Your table is reserved. I am fine, thank you.")


@pytest.mark.parametrize("wordings", [Wordings.NEW_SENTENCES, Wordings.NEW_CONSTRUCTIONS])
def test_the_vocabulary_and_training_hold_nothing_of_the_test(talks, wordings):
    texts = list(vocabulary_texts(talks, []))
    for kind in KINDS:
        hidden = [text.replace("{}", "") for text in (*told_by(kind, wordings), *asked_by(kind, wordings))]
        assert not set(hidden) & set(texts)


def test_facts_are_told_and_asked_in_many_constructions():
    rng = random.Random(4)
    for kind in KINDS:
        told = {kind.telling(rng, "VALUE", Wordings.TRAINING).lower() for _ in range(600)}
        asked = {kind.asking(rng, Wordings.TRAINING) for _ in range(600)}
        assert all("value" in text for text in told)
        assert len(told) > 250 and len(asked) > 50
        for frame in (*CLAUSE_FRAMES, *QUESTION_ASKS, *TOPIC_ASKS):
            assert frame.count("{") == 1


# Small talk


def test_many_conversations_begin_with_a_greeting_that_is_answered_as_one(talks):
    rng = random.Random(5)
    firsts, between = [], 0
    for _ in range(1000):
        conversation, roles = recall_conversation(rng, talks)
        if roles[0] is Role.SMALL_TALK:
            firsts.append(conversation.exchanges[0])
        between += Role.SMALL_TALK in roles[1:-1]
    assert 250 < len(firsts) < 350
    assert between > 200
    bare = {plain(one.user) for one in firsts}
    assert {"hi", "hello", "hey", "good morning", "good evening", "how are you"} <= bare
    assert len({one.user for one in firsts}) > 150  # of all cases and marks
    for one in firsts:
        if plain(one.user) in ("hi", "hello", "hey"):
            assert one.reply.startswith(("Hello", "Hi"))
        if plain(one.user) == "good morning":
            assert one.reply.startswith("Good morning")


def test_what_the_model_is_for_is_said_when_asked():
    replies = {plain(one.user): one.reply for one in training_exchanges()}
    for question in ("What can you do?", "Who are you?", "How can you help me?", "What is your name?"):
        reply = replies[plain(question)]
        assert all(what in reply for what in ("restaurants", "music", "flights", "movies", "hotels", "buses"))
        assert "weather" in reply and "remember" in reply
    assert replies["thank you"].startswith("You are welcome")


def test_held_out_greetings_are_never_trained(talks):
    hidden = {plain(text) for text in held_out_prompts()}
    assert len(hidden) > 20
    assert not hidden & {plain(one.user) for one in training_exchanges()}
    assert not hidden & {plain(text) for text in FILLERS}
    rng = random.Random(6)
    for make in (opening, passing, closing):
        assert not hidden & {plain(make(rng).user) for _ in range(1000)}


def plain(text):
    """In lower case and without a mark at the end."""
    return text.lower().rstrip(".!?")
