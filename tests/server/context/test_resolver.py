"""The resolver finds the longest match of its owner, and continues from the ids as they were sampled."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest

from pensieve_jax.core.errors import ChatTemplateError, TokenizerMissingError, UnknownTurnError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import root_of
from pensieve_jax.server.context import hashes, resolver, turn_index
from pensieve_jax.server.context.resolver import Memory, Resolver
from pensieve_jax.server.context.turn_index import PastTurn, TurnIndex
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.chat import ChatFormat
from tests.seeds import new_seed
from tests.server.context.no_turns import NoTurns
from tests.server.context.scenarios import FakeSource, Scenario, assistant, output_of, tokenizer, user
from tests.text.tool_templates import WITH_TOOLS, call

NUM_SCENARIOS = 60


def finish(resolved, text: str = "fine", **options):
    ids = [*tokenizer().encode(text, add_bos=False), tokenizer().eos_id]
    return resolved.commit(output_of(ids, text, **options))


def test_random_trees_of_conversations():
    draw, num_found = random.Random(new_seed()), 0
    for _ in range(NUM_SCENARIOS):
        seed = draw.randrange(2**32)
        scenario = Scenario(seed)
        try:
            scenario.run()
        except AssertionError:
            print(f"Scenario({seed}).run()")
            raise
        num_found += scenario.num_found
    assert num_found > 3 * NUM_SCENARIOS  # the scenarios find turns: half of the usual number


def ignore_role(chain: bytes, message: dict) -> bytes:
    return ORIGINAL_CHAIN_AFTER(chain, {**message, "role": "any"})


def ignore_owner(owner: str, *others) -> bytes:
    return ORIGINAL_ROOT("", *others)


def find_of_any_owner(self: TurnIndex, owner: str, before: bytes, reply: dict, **options):
    for other in ("ann", "bob"):
        found = ORIGINAL_FIND(self, other, before, reply, **options)
        if found is not None:
            return found
    return None


def find_stale(self: TurnIndex, owner: str, before: bytes, reply: dict, **options):
    """Find the reply at the position of the one before it."""
    found = ORIGINAL_FIND(self, owner, before, reply, **options)
    return found if found is None or found.parent_id is None else self.turn(owner, found.parent_id)


def commit_retokenized(self, output):
    ids = tokenizer().encode(output.text, add_bos=False)
    return ORIGINAL_COMMIT(self, output_of(ids, output.text, output.finish_reason))


def find_in_old_memory(self: TurnIndex, epoch: int) -> None:
    self._epoch = epoch


def find_undurable(self: TurnIndex, owner: str, before: bytes, reply: dict, **options):
    return ORIGINAL_FIND(self, owner, before, reply, durable=False)


def keep_white_space(text: str) -> str:
    return text


ORIGINAL_CHAIN_AFTER, ORIGINAL_ROOT = hashes.chain_after, hashes.root_chain
ORIGINAL_FIND, ORIGINAL_COMMIT = TurnIndex.find, resolver.ResolvedContext.commit
PLANTED = {
    "a chain that ignores roles": [
        (hashes, "chain_after", ignore_role),
        (turn_index, "chain_after", ignore_role),
    ],
    "another owner's turn": [
        (resolver, "root_chain", ignore_owner),
        (TurnIndex, "find", find_of_any_owner),
    ],
    "a stale parent": [(TurnIndex, "find", find_stale)],
    "a reply that was tokenized again": [(resolver.ResolvedContext, "commit", commit_retokenized)],
    "memory of an engine that is gone": [(TurnIndex, "see_epoch", find_in_old_memory)],
    "a durable turn behind one in memory": [(TurnIndex, "find", find_undurable)],
    "white space that counts": [(hashes, "canonical_text", keep_white_space)],
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_detected(bug, monkeypatch):
    for owner, name, planted in PLANTED[bug]:
        monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, StopIteration)):
        for seed in range(NUM_SCENARIOS):
            Scenario(seed).run()


def test_a_small_memory_finds_durable_turns_in_the_history():
    """The budget holds one or two turns. Durable turns come from the history; others start a new tree."""
    for seed in range(10):
        scenario = Scenario(seed, max_bytes=4000)
        scenario.random.random = lambda draw=scenario.random.random: draw() * 0.59  # all durable
        scenario.run()
        assert scenario.index.num_bytes <= 4000 or len(scenario.index) == 1


def test_the_index_counts_about_as_many_bytes_as_it_uses():
    """Covers many short messages, and characters of four bytes."""
    index = TurnIndex(NoTurns(), max_bytes=400_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(40):
            sent = json.dumps([user(f"{number}/{i}") for i in range(100)])
            index.add(
                PastTurn(
                    turn_id=f"{number:032x}",
                    parent_id=None,
                    owner="ann",
                    before=b"x" * 32,
                    num_tokens=1,
                    messages=tuple(json.loads(sent)),
                    prompt_token_ids=range(30),
                    output_token_ids=range(20),
                    reply=assistant("\U0001f600" * 3000),
                    durable=True,
                )
            )
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 1 < len(index) < 40 and index.num_bytes <= 400_000
    assert 0.6 * index.num_bytes < taken < 1.2 * index.num_bytes


def test_a_whole_context_and_its_turns_have_the_same_chain(resolving):
    """A tree that began with replies from elsewhere is found when its context is sent again."""
    context = [user("hi"), assistant("hello"), user("again")]
    first = resolving.resolve("ann", context, epoch=1, durable=False)
    assert first.parent is None and first.missed_tokens > 0
    finish(first)
    second = resolving.resolve("ann", [*context, assistant("fine"), user("more")], epoch=1, durable=False)
    assert second.parent.turn_id == first.node.turn_id and second.missed_tokens == 0


def test_regenerations_and_edited_replies_are_siblings(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    resolving.index._source.turns.append(finish(first, "one"))
    again = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    assert again.parent is None
    finish(again, "two")
    for reply, turn in (("one", first), ("two", again)):
        found = resolving.resolve("ann", [user("hi"), assistant(reply), user("so")], epoch=1, durable=True)
        assert found.node.parent_id == turn.node.turn_id
    edited = resolving.resolve("ann", [user("hi"), assistant("three"), user("so")], epoch=1, durable=True)
    assert edited.parent is None


def test_several_replies_to_one_context_have_different_ids(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=False)
    finish(first)
    second = resolving.resolve("ann", [user("hi"), assistant("fine"), user("x")], epoch=1, durable=False)
    other = second.again()
    assert other.node.turn_id != second.node.turn_id
    assert other.node.parent_id == second.node.parent_id == first.node.turn_id
    assert second.again(second.node.turn_id).node == second.node


def test_a_named_turn_is_continued(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    finish(first)
    second = resolving.resolve_after("ann", first.node.turn_id, [user("and")], epoch=1, durable=True)
    by_message = resolving.resolve("ann", [user("hi"), assistant("fine"), user("and")], epoch=1, durable=True)
    assert second.prompt_token_ids == by_message.prompt_token_ids
    assert second.node.chain == by_message.node.chain
    assert second.match_kind(output_of([1], "x")) == "id"
    assert by_message.match_kind(output_of([1], "x")) == "message"
    for owner, turn_id in (("bob", first.node.turn_id), ("ann", "f" * 32)):
        with pytest.raises(UnknownTurnError):
            resolving.resolve_after(owner, turn_id, [user("and")], epoch=1, durable=True)


def test_only_durable_turns_can_be_named_for_durable_ones(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=False)
    finish(first)
    resolving.resolve_after("ann", first.node.turn_id, [user("and")], epoch=1, durable=False)
    with pytest.raises(UnknownTurnError):
        resolving.resolve_after("ann", first.node.turn_id, [user("and")], epoch=1, durable=True)


def test_the_engine_reports_whether_chunks_were_reused(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=False)
    assert first.match_kind(output_of([1], "x")) == "none"
    assert first.match_kind(output_of([1], "x", reused_gpu_tokens=32)) == "chunk"
    assert first.match_kind(output_of([1], "x", swapped_in_tokens=32)) == "chunk"


def test_a_smaller_memory_finds_less(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=False)
    finish(first)
    context = [user("hi"), assistant("fine"), user("and")]
    kinds = {
        memory: resolving.resolve("ann", context, epoch=1, durable=False, memory=memory).parent is not None
        for memory in Memory
    }
    assert kinds == {Memory.ALL: True, Memory.DURABLE: False, Memory.NONE: False}


def test_a_path_with_a_gap_is_no_match(resolving):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=False)
    finish(first)
    context = [user("hi"), assistant("fine"), user("and")]
    second = resolving.resolve("ann", context, epoch=1, durable=False)
    finish(second)
    resolving.index.forget("ann", first.node.turn_id)
    third = resolving.resolve("ann", [*context, assistant("fine"), user("so")], epoch=1, durable=False)
    assert third.parent is None
    with pytest.raises(UnknownTurnError):
        resolving.resolve_after("ann", second.node.turn_id, [user("so")], epoch=1, durable=False)


def template_tokenizer(template: str | None) -> Tokenizer:
    loaded = tokenizer()
    loaded.chat_template = template
    return loaded


# This template writes the number of messages, so a later rendering does not extend an earlier one.
COUNTING = (
    "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.mark.parametrize("by_id", [False, True])
def test_a_template_that_writes_the_past_differently_replaces_it(by_id):
    resolving = Resolver(template_tokenizer(COUNTING), "model:1", TurnIndex(FakeSource()))
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    path = [*first.prompt_token_ids, *finish(first).output_token_ids]
    context = [user("hi"), assistant("fine"), user("and")]
    if by_id:
        second = resolving.resolve_after("ann", first.node.turn_id, context[2:], epoch=1, durable=True)
    else:
        second = resolving.resolve("ann", context, epoch=1, durable=True)
    assert second.parent.turn_id == second.node.parent_id == first.node.turn_id
    assert second.messages == (user("and"),) and second.keep < len(path)
    assert second.spec(SamplingParams()).keep == second.keep
    assert second.num_context_tokens == second.keep + len(second.prompt_token_ids)
    path = [*path[: second.keep], *second.prompt_token_ids]
    assert tokenizer().decode(path).replace(" ", "") == "3<user>hi<assistant>fine<user>and<assistant>"
    path += finish(second, "so").output_token_ids
    third = resolving.resolve("ann", [*context, assistant("so"), user("on")], epoch=1, durable=True)
    assert third.parent.turn_id == second.node.turn_id
    path = [*path[: third.keep], *third.prompt_token_ids]
    assert (
        tokenizer().decode(path).replace(" ", "").startswith("5<user>hi<assistant>fine<user>and<assistant>so")
    )


def test_models_without_a_template_have_no_contexts():
    with pytest.raises(ChatTemplateError):
        Resolver(template_tokenizer(None), "m", TurnIndex(NoTurns())).resolve(
            "ann", [user("hi")], epoch=1, durable=True
        )
    with pytest.raises(TokenizerMissingError):
        Resolver(None, "m", TurnIndex(NoTurns())).resolve("ann", [user("hi")], epoch=1, durable=True)


def test_developer_messages_become_system_messages_if_the_template_has_no_developer_role(resolving):
    developer = resolving.resolve(
        "ann", [{"role": "developer", "content": "be brief"}, user("hi")], epoch=1, durable=True
    )
    system = resolving.resolve(
        "ann", [{"role": "system", "content": "be brief"}, user("hi")], epoch=1, durable=True
    )
    assert developer.prompt_token_ids == system.prompt_token_ids
    assert developer.node.chain == system.node.chain


def test_the_spec_carries_node_messages_and_attachment(resolving):
    resolved = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    spec = resolved.spec(SamplingParams(), attachment="kept")
    assert spec.node.attachment == "kept" and resolved.node.attachment is None
    assert spec.node.turn_id == resolved.node.turn_id and spec.messages == (user("hi"),)
    assert spec.conversation_id is None and spec.prompt_token_ids == resolved.prompt_token_ids


def test_chain_hashes_separate_their_parts():
    root = hashes.root_chain("ann", "m", None)
    assert hashes.root_chain("an", "nm", None) != root

    def after(content: str | None, **others) -> bytes:
        return hashes.chain_after(root, {"role": "user", "content": content, **others})

    assert after("ab") != after("b", role="usera")
    assert after("hi \n") == after("hi") != after(" hi")
    assert after("\ud800") != after("") == after(None)
    assert after("hi", name="ann") != after("hi") == after("hi", name=None)
    assert after("hi", name="ann") != after("hi", tool_call_id="ann")
    assert after("hi", reasoning="why") == after("hi")
    one, other = call("a", "f", '{"x": 1.0}'), call("b", "f", '{"x":1}')
    assert after("", tool_calls=[one]) == after("", tool_calls=[other]) != after("")
    assert after("", tool_calls=[one, other]) != after("", tool_calls=[one])
    assert after("", tool_calls=[one]) != after("", tool_calls=[call("a", "g", '{"x": 1}')])


def test_the_root_has_tools_and_template_arguments():
    roots = [
        hashes.root_chain("ann", "m", None, given)
        for given in (
            NO_INPUT,
            WITH_TOOLS,
            TemplateInput(WITH_TOOLS.tools[:1]),
            TemplateInput(arguments={"enable_thinking": False}),
            TemplateInput(arguments={"enable_thinking": True}),
        )
    ]
    assert len(set(roots)) == len(roots) and roots[0] == hashes.root_chain("ann", "m", None)
    prefilled = TemplateInput(prefill="Sure", generation_prompt=False)
    assert hashes.root_chain("ann", "m", None, prefilled) == roots[0]
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert hashes.root_chain("", "", "", TemplateInput(arguments=one)) == hashes.root_chain(
        "", "", "", TemplateInput(arguments=other)
    )


class CountingSource(NoTurns):
    """An empty source that records which replies were looked up."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_chain(self, owner: str, before: bytes, reply: dict) -> None:
        self.asked.append(reply["content"])


def test_only_the_last_replies_are_looked_up_in_the_history():
    source = CountingSource()
    resolving = Resolver(tokenizer(), "m", TurnIndex(source))
    first = resolving.resolve("ann", [user("q0")], epoch=1, durable=False)
    finish(first, "a0")
    messages = [each for i in range(300) for each in (user(f"q{i}"), assistant(f"a{i}"))]
    found = resolving.resolve("ann", [*messages, user("last")], epoch=1, durable=False)
    assert source.asked == [f"a{i}" for i in range(299, 299 - resolver._MAX_LOOK_UPS, -1)]
    assert found.node.parent_id == first.node.turn_id, "those before are found in memory"


def test_a_context_that_its_template_refuses_is_rendered_once(monkeypatch):
    resolving = Resolver(tokenizer(), "m", TurnIndex(NoTurns()))
    messages: list[dict] = []
    for i in range(20):
        messages.append(user(f"q{i}"))
        finish(resolving.resolve("ann", messages, epoch=1, durable=False), f"a{i}")
        messages.append(assistant(f"a{i}"))
    tries = []

    def refuse(self: ChatFormat, earlier, token_ids, new_messages, **options) -> None:
        tries.append(len(earlier))
        raise ChatTemplateError("no")

    monkeypatch.setattr(ChatFormat, "turn_prompt", refuse)
    with pytest.raises(ChatTemplateError):
        resolving.resolve("ann", [*messages, user("last")], epoch=1, durable=False)
    assert tries == [20]


def test_few_parents_are_tried_if_the_history_has_lost_their_paths(resolving, monkeypatch):
    messages: list[dict] = []
    for i in range(20):
        messages.append(user(f"q{i}"))
        finish(resolving.resolve("ann", messages, epoch=1, durable=False), f"a{i}")
        messages.append(assistant(f"a{i}"))
    tries = []

    def lost(self: TurnIndex, turn: PastTurn) -> None:
        tries.append(turn.turn_id)
        raise UnknownTurnError(turn.turn_id)

    monkeypatch.setattr(TurnIndex, "path", lost)
    found = resolving.resolve("ann", [*messages, user("last")], epoch=1, durable=False)
    assert found.parent is None and len(tries) == resolver._MAX_TRIES
    assert not any(resolving.index.remembers("ann", turn_id) for turn_id in tries)


def test_contexts_with_the_same_beginning_share_a_root_on_several_engines():
    """Only in-memory turns need this: any front end finds a durable turn, and its root, in the history."""
    routed = Resolver(tokenizer(), "model:1", TurnIndex(NoTurns()), is_routed=True)
    other = Resolver(tokenizer(), "model:1", TurnIndex(NoTurns()), is_routed=True)

    def root(resolving: Resolver, *messages: dict, owner: str = "me", durable: bool = False) -> str:
        return root_of(resolving.resolve(owner, messages, epoch=1, durable=durable).node.turn_id)

    begun = (user("Hi"),)
    grown = (*begun, assistant("Hello"), user("And now?"))
    assert root(routed, *begun) == root(other, *begun) == root(other, *grown)
    assert root(routed, *begun) != root(routed, *begun, owner="you")
    assert root(routed, *begun) != root(routed, user("Ho"))
    assert root(routed, {"role": "system", "content": "Be brief."}, *begun) != root(routed, *begun)
    assert root(routed, *begun, durable=True) != root(routed, *begun, durable=True)


def test_choices_of_one_context_have_one_root(resolving):
    one = resolving.resolve("me", [user("Hi")], epoch=1, durable=True)
    other = one.again()
    assert root_of(other.node.turn_id) == root_of(one.node.turn_id)
    assert other.node.turn_id != one.node.turn_id and other.node.parent_id is None


def test_new_roots_that_any_front_end_can_find_are_named_with_their_token_counts():
    asked = []

    def root_for(num_tokens: int) -> str:
        asked.append(num_tokens)
        return f"{len(asked):016x}"

    resolving = Resolver(tokenizer(), "model:1", TurnIndex(NoTurns()), is_routed=True, root_for=root_for)
    begun = resolving.resolve("me", [user("Hi")], epoch=1, durable=True)
    assert asked == [len(begun.prompt_token_ids)] and root_of(begun.node.turn_id) == f"{1:016x}"
    resolving.resolve("me", [user("Hi")], epoch=1, durable=False)
    finish(begun, "Hello")
    grown = [user("Hi"), assistant("Hello"), user("And now?")]
    assert resolving.resolve("me", grown, epoch=1, durable=True).node.parent_id == begun.node.turn_id
    assert len(asked) == 1, "those have a root"


def spoken(*roles: str, size: int = 10) -> list[dict[str, str]]:
    return [{"role": role, "content": "x" * size} for role in roles]


@pytest.mark.parametrize(
    ("roles", "position"),
    [(("user",), 0), (("system", "user", "user"), 1), (("assistant", "user"), 1), (("system", "tool"), 1)],
)
def test_the_first_user_message_is_found(roles, position):
    assert resolver._first_user_position(spoken(*roles)) == position


@pytest.mark.parametrize(
    ("roles", "num_tokens"),
    [
        (("user", "user"), 0),
        (("assistant", "user"), 50),
        (("user", "assistant", "user", "user"), 50),
        (("user", "assistant", "user", "assistant", "user"), 80),
        (("assistant",), 100),
    ],
)
def test_tokens_up_to_the_last_reply_count_as_missed(roles, num_tokens):
    assert resolver._missed_tokens(spoken(*roles), 100) == num_tokens


def test_messages_without_text_add_no_missed_tokens():
    assert resolver._missed_tokens(spoken("assistant", "user", size=0), 100) == 0


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_the_first_message_of_a_context_continues_no_turn(resolving, role):
    """It equals the reply to the same context, but no message is before it."""
    context = [{"role": role, "content": "fine"}, user("hi")]
    first = resolving.resolve("ann", context, epoch=1, durable=False)
    finish(first, "fine")
    again = resolving.resolve("ann", context, epoch=1, durable=False)
    assert (first.parent, again.parent) == (None, None)
    assert again.messages == tuple(context)


def test_the_shortest_context_that_continues_a_turn(resolving):
    """It has one message, its reply, and a new message."""
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=False)
    finish(first, "fine")
    context = [user("hi"), assistant("fine"), user("more")]
    assert resolving.resolve("ann", context, epoch=1, durable=False).parent.turn_id == first.node.turn_id
