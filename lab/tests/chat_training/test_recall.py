"""The chat model's training: what is told, asked and greeted, and what is reserved for the tests."""

import functools
import itertools
import random
import re

import pytest

from pensieve_lab.chat_training import corrections, held_out, questions
from pensieve_lab.chat_training.corpus import vocabulary_texts
from pensieve_lab.chat_training.frames import (
    CLAUSE_FRAMES,
    LEADS,
    QUESTION_ASKS,
    TAILS,
    TOPIC_ASKS,
    TOPIC_TELLS,
)
from pensieve_lab.chat_training.grammar import CLAUSE_PATTERNS, QUESTION_PATTERNS, TOPIC_PATTERNS, Scraps
from pensieve_lab.chat_training.kinds import KINDS
from pensieve_lab.chat_training.questions import Fact, answer, gives_a_fact
from pensieve_lab.chat_training.recall import Role, recall_conversation
from pensieve_lab.chat_training.recall_cases import (
    QuestionKind,
    holds,
    percent_by_kind,
    recall_case,
    recall_cases,
)
from pensieve_lab.chat_training.small_talk import (
    FILLERS,
    closing,
    held_out_prompts,
    opening,
    passing,
    training_exchanges,
)
from pensieve_lab.chat_training.values import is_closed, is_held_out
from pensieve_lab.chat_training.wordings import (
    Wordings,
    held_out_wordings,
    training_wordings,
    within_sentence,
)

SCRAPS = Scraps(["The weather is fine in the north of the country today, and people like it."])
TEST_PARTS = [part for part in Wordings if part is not Wordings.TRAINING]


def conversations(talks, number, seed):
    rng = random.Random(seed)
    return (recall_conversation(rng, talks, SCRAPS) for _ in range(number))


def test_training_never_tells_held_out_values_in_held_out_words(talks):
    questions = {text for kind in KINDS for text in kind.questions}  # which any sentence may hold
    pieces = [piece for piece in map(longest_piece, hidden_wordings()) if len(piece) > 9]
    pieces = [piece for piece in pieces if piece.strip(", ") not in questions]
    talked = {exchange for talk in talks for exchange in talk.exchanges}
    replies = {exchange.reply for exchange in talked}
    num_told = 0
    for conversation, roles in conversations(talks, 400, seed=1):
        told = ""
        for exchange, role in zip(conversation.exchanges, roles, strict=True):
            assert (exchange in talked) == (role is Role.TALK)
            assert (exchange.reply in replies) == (role in (Role.TALK, Role.REQUEST))
            told += f" {exchange.user}"
            if role is Role.SMALL_TALK:
                assert not gives_a_fact(exchange.reply) and "not told" not in exchange.reply
            elif role is not Role.TALK:
                assert not [piece for piece in pieces if piece in exchange.user.lower()]
                for value in answered_values(exchange.reply):
                    assert holds(told, value) and not is_held_out(value) and gives_a_fact(exchange.reply)
                    num_told += 1
    assert num_told > 400


def hidden_wordings():
    for kind in KINDS:
        yield from (*held_out_wordings(kind.asks), *held_out_wordings(kind.tells))
        yield from (*kind.new_tells, *kind.new_asks, *kind.test_asks)


def longest_piece(text):
    return max(text.replace("~", "").split("{}"), key=len).strip(" .?").lower()


def answered_values(reply):
    """Return the values that a reply about one or two facts gives ("You are a group of ..." is not a
    name)."""
    for pattern in answer_patterns():
        yield from pattern.findall(reply)


@functools.cache
def answer_patterns():
    """Compile the patterns once, since there are more than `re` caches."""
    found = []
    for template in sorted({text for kind in KINDS for text in kind.answers}):
        before, _, after = template.removesuffix(".").partition("{}")
        text = rf"{re.escape(before)}(\d+:\d\d [ap]m|(?!a )[\w ]+?){re.escape(after)}(?:, and |[.])"
        found.append(re.compile(rf"(?:^|, and |(?<=[.:,] )){text}", re.IGNORECASE))
    return found


def test_no_pattern_or_frame_makes_a_held_out_question():
    for kind in KINDS:
        made = set()
        for word, texts, frames in (
            ("question", kind.questions, (*QUESTION_ASKS, *QUESTION_PATTERNS)),
            ("topic", kind.topics, (*TOPIC_ASKS, *TOPIC_PATTERNS)),
        ):
            sentences = [sentence for frame in frames for sentence in alternatives(frame)]
            made |= {one.format(**{word: text}).lower() for one in sentences for text in texts}
        hidden = [text.lower().rstrip("?.") for text in (*held_out_wordings(kind.asks), *kind.test_asks)]
        assert not [text for text in made for piece in hidden if piece in text]


def alternatives(pattern):
    """Return every sentence that a pattern matches."""
    parts = re.split(r"\(([^()]*)\)", pattern)
    choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def test_no_four_words_of_the_test_s_constructions_stand_in_training():
    lists = (LEADS, TAILS, CLAUSE_FRAMES, TOPIC_TELLS, QUESTION_ASKS, TOPIC_ASKS)
    lists += (QUESTION_PATTERNS, TOPIC_PATTERNS, CLAUSE_PATTERNS)
    lists += tuple(map(training_wordings, (corrections._BARE, corrections._NAMED, questions._JOINTS)))
    lists += tuple(training_wordings(every) for kind in KINDS for every in (kind.tells, kind.asks))
    trained = {run for texts in lists for text in texts for one in alternatives(text) for run in runs(one)}
    hidden = (held_out.TELLS, held_out.QUESTION_ASKS, held_out.TOPIC_ASKS, held_out.JOINT_ASKS)
    hidden += (held_out.NAMED_CORRECTIONS, held_out.BARE_CORRECTIONS)
    tested = {run for texts in hidden for text in texts for run in runs(text)}
    assert len(tested) > 50 and len(trained) > 2000
    assert not tested & trained


def runs(text):
    """Return every four consecutive words, none of them across a field."""
    for piece in re.split(r"\{+\w*\}+", text):
        words = re.findall(r"[a-z']+", piece.lower())
        yield from zip(words, words[1:], words[2:], words[3:], strict=False)


def told_by(kind, wordings):
    """Return every sentence that may tell the kind of fact, with ~ left out."""
    tells = [text.replace("~", "") for text in held_out_wordings(kind.tells)]
    if wordings is Wordings.NEW_SENTENCES:
        return tells
    if wordings is Wordings.NEW_CONSTRUCTIONS:
        return kind.new_tells
    clauses = [within_sentence(text).rstrip(".") for text in tells]
    return [frame.format(clause=clause) for frame in held_out.TELLS for clause in clauses]


def asked_by(kind, wordings):
    asks = {
        Wordings.NEW_SENTENCES: held_out_wordings(kind.asks),
        Wordings.NEW_CONSTRUCTIONS: kind.new_asks,
        Wordings.TEST_CONSTRUCTIONS: kind.test_asks,
    }
    return asks[wordings]


@pytest.mark.parametrize("wordings", TEST_PARTS)
def test_a_test_case_asks_for_a_held_out_fact_told_first(talks, wordings):
    rng = random.Random(2)
    seen = set()
    for _ in range(400):
        case = recall_case(rng, talks, (3, 6), wordings)
        seen.add(case.kind)
        [value] = case.values
        assert (is_held_out(value) or is_closed(value)) and not case.outdated
        assert holds(case.history.exchanges[0].user, value) and not holds(case.question, value)
        assert 4 <= len(case.history.exchanges) <= 7
        of_family = [kind for kind in KINDS if kind.family == case.kind]
        told = [text.format(value) for kind in of_family for text in told_by(kind, wordings)]
        assert any(text in case.history.exchanges[0].user for text in told)
        asks = [text.lower() for kind in of_family for text in asked_by(kind, wordings)]
        assert case.question.lower().endswith(tuple(asks))
    assert seen == {kind.family for kind in KINDS}


@pytest.mark.parametrize("wordings", TEST_PARTS)
def test_a_case_of_two_holds_both_and_a_corrected_one_only_what_holds_by_now(talks, wordings):
    rng = random.Random(3)
    for _ in range(100):
        two = recall_case(rng, talks, (3, 6), wordings, QuestionKind.TWO)
        first, second = two.values
        assert holds(two.history.exchanges[0].user, first) and holds(two.history.exchanges[0].user, second)
        assert two.is_right(f"{first} and {second}.") and not two.is_right(f"{first}.")
        for kind, corrected_in in ((QuestionKind.CORRECTED_AT_ONCE, 1), (QuestionKind.CORRECTED_LATER, 2)):
            case = recall_case(rng, talks, (3, 6), wordings, kind)
            [new], [old] = case.values, case.outdated
            assert all(is_held_out(value) or is_closed(value) for value in (new, old))
            assert holds(case.history.exchanges[0].user, old)
            assert holds(case.history.exchanges[corrected_in].user, new)
            assert case.is_right(f"It is {new}.") and not case.is_right(f"It is {new}, or {old}.")
            assert not case.is_right(f"It is {old}.")
            assert case.kind == kind.value


def test_a_fifth_of_all_values_is_held_out_but_no_weekday_or_small_number_of_people():
    rng = random.Random(0)
    [table] = [kind for kind in KINDS if kind.name == "table"]
    [exam] = [kind for kind in KINDS if kind.name == "exam_day"]
    for kind, common in ((table, {"five", "6", "twelve"}), (exam, {"Monday", "Friday", "Thursday"})):
        trained = {kind.value(rng, "", Wordings.TRAINING) for _ in range(3000)}
        tested = {kind.value(rng, "", Wordings.NEW_SENTENCES) for _ in range(3000)}
        assert trained & tested == {value for value in trained | tested if is_closed(value)} >= common
        assert len(tested - trained) > 20
    values = [str(number) for number in range(1000, 6000)]
    assert 0.18 < sum(map(is_held_out, values)) / len(values) < 0.22


def test_half_of_the_cases_ask_for_one_fact_and_the_others_are_of_every_kind(talks):
    kinds = [case.kind for case in recall_cases(60, talks, 0)]
    for kind in QuestionKind:
        assert kinds.count(kind.value) == (0 if kind is QuestionKind.ONE else 10)
    assert percent_by_kind(recall_cases(2, talks, 0), ["", ""]) == {
        kind: (0.0, 1) for kind in sorted(kinds[:2])
    }


def test_in_training_facts_are_corrected_and_asked_for_two_at_once(talks):
    num_two, num_changed = 0, 0
    for conversation, _ in conversations(talks, 400, seed=7):
        latest = {}
        for exchange in conversation.exchanges:
            values = list(answered_values(exchange.reply))
            num_two += len(values) == 2 and exchange.user.endswith("?")
            for kind in KINDS:
                for template in kind.answers:
                    before, _, after = template.partition("{}")
                    if exchange.reply.startswith(before) and exchange.reply.endswith(after) and before:
                        value = exchange.reply[len(before) : -len(after)]
                        num_changed += latest.get(kind.name, value) != value
                        latest[kind.name] = value
    assert num_two > 50 and num_changed > 30


def test_a_value_corrected_in_its_sentence_is_not_the_first_one(talks):
    rng = random.Random(4)
    for _ in range(50):
        text = corrections.within(rng, "Ada", "Boris")
        assert holds(text, "Ada") and holds(text, "Boris")


def test_two_answers_are_one_sentence():
    [name] = [kind for kind in KINDS if kind.name == "name"]
    [table] = [kind for kind in KINDS if kind.name == "table"]
    rng = random.Random(0)
    text = answer(rng, [Fact(name, "Ada"), Fact(table, "four")])
    assert re.fullmatch(
        r"(Your name is|You are) Ada, and (the table is|you need a table) for four people[.]", text
    )
    assert "not told" in answer(rng, [Fact(name, "Ada"), table]) and "Ada" in text


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
    assert gives_a_fact("All right, your train leaves at 4:15 pm.")
    assert gives_a_fact("Six people work in your team.")
    assert not gives_a_fact("You are welcome.") and not gives_a_fact("You have not told me your name yet.")
    assert not gives_a_fact("Your table is reserved. I am fine, thank you.")


@pytest.mark.parametrize("wordings", TEST_PARTS)
def test_the_vocabulary_and_training_hold_nothing_of_the_test(talks, wordings):
    texts = list(vocabulary_texts(talks, []))
    for kind in KINDS:
        hidden = [text.replace("{}", "") for text in (*told_by(kind, wordings), *asked_by(kind, wordings))]
        assert not set(hidden) & set(texts)


def test_facts_are_told_and_asked_in_many_constructions():
    rng = random.Random(4)
    for kind in KINDS:
        told = {kind.telling(rng, "VALUE", Wordings.TRAINING, SCRAPS).lower() for _ in range(600)}
        asked = {kind.asking(rng, Wordings.TRAINING, SCRAPS) for _ in range(600)}
        assert all("value" in text for text in told)
        assert len(told) > 250 and len(asked) > 50
        for frame in (*CLAUSE_FRAMES, *QUESTION_ASKS, *TOPIC_ASKS):
            assert frame.count("{") == 1


# Small talk


def test_many_conversations_begin_with_a_greeting_that_is_answered_as_one(talks):
    firsts, between = [], 0
    for conversation, roles in conversations(talks, 1500, seed=6):
        if roles[0] is Role.SMALL_TALK:
            firsts.append(conversation.exchanges[0])
        between += Role.SMALL_TALK in roles[1:-1]
    assert 375 < len(firsts) < 525
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
