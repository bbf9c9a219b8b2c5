"""Replies that ended with more than the client was sent: later turns use the text of the messages."""

from __future__ import annotations

import pytest

from pensieve_jax.text.chat import ChatFormat
from tests.server.context.scenarios import assistant, output_of, tokenizer, user


def ended_by(resolved, text: str, *ids: int):
    """Commit a reply that ends with ids whose text its client was not sent."""
    return resolved.commit(output_of([*tokenizer().encode(text, add_bos=False), *ids], text))


STOP_IDS = {
    "a stop string": tokenizer().encode("STOP", add_bos=False),
    "a control token": [tokenizer()._backend.token_to_id("<|user|>")],
}


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("ending", STOP_IDS)
def test_later_turns_skip_text_that_the_client_was_not_sent(resolving, ending, by_id):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    ended_by(first, "fine", tokenizer().eos_id)
    context = [user("hi"), assistant("fine"), user("and")]
    second = resolving.resolve("ann", context, epoch=1, durable=True)
    ended_by(second, "one", *STOP_IDS[ending])
    context += [assistant("one"), user("so")]
    if by_id:
        third = resolving.resolve_after("ann", second.node.turn_id, context[-1:], epoch=1, durable=True)
        assert third.parent is None  # a new tree, whose first chunks the engine finds
        assert third.prompt_token_ids == ChatFormat(tokenizer()).turn_token_ids([], context)
    else:
        third = resolving.resolve("ann", context, epoch=1, durable=True)
        assert third.parent.turn_id == first.node.turn_id and third.messages == tuple(context[2:])
    assert third.node.chain == resolving.resolve("ann", context, epoch=1, durable=True).node.chain
    written = tokenizer().decode_raw(third.prompt_token_ids)
    assert written.endswith("and<|end|><|assistant|>one<|end|><|user|>so<|end|><|assistant|>")
    ended_by(third, "fine", tokenizer().eos_id)
    fourth = resolving.resolve("ann", [*context, assistant("fine"), user("on")], epoch=1, durable=True)
    assert fourth.parent.turn_id == third.node.turn_id


def test_unsent_ids_that_equal_the_templates_ending_are_kept(resolving):
    """The text is the same either way, so the ids stay as they were sampled."""
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    ended_by(first, "one", *tokenizer().encode("<|end|>", add_bos=False))
    second = resolving.resolve("ann", [user("hi"), assistant("one"), user("so")], epoch=1, durable=True)
    assert second.parent.turn_id == first.node.turn_id


def test_stopped_replies_do_not_hide_the_turn_before_them(resolving, monkeypatch):
    """Their ids show that they do not match, so no path is rendered for that."""
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    ended_by(first, "fine", tokenizer().eos_id)
    context = [user("hi"), assistant("fine")]
    tried = []
    turn_token_ids = ChatFormat.turn_token_ids

    def counted(self, earlier, *args, **kwargs):
        tried.append(len(earlier))
        return turn_token_ids(self, earlier, *args, **kwargs)

    monkeypatch.setattr(ChatFormat, "turn_token_ids", counted)
    decoded = []
    may_follow = ChatFormat.may_follow
    monkeypatch.setattr(
        ChatFormat, "may_follow", lambda self, turn: decoded.append(turn) or may_follow(self, turn)
    )
    for number in range(12):
        context.append(user(f"and {number}"))
        tried.clear()
        decoded.clear()
        turn = resolving.resolve("ann", context, epoch=1, durable=True)
        assert turn.parent is not None and turn.parent.turn_id == first.node.turn_id
        assert tried == [1] and len(decoded) <= 2, "a reply was decoded again after its refusal"
        ended_by(turn, "one", *STOP_IDS["a stop string"])
        context.append(assistant("one"))
    tried.clear()
    named = resolving.resolve_after("ann", turn.node.turn_id, [user("so")], epoch=1, durable=True)
    assert named.parent is None and tried == [0]
