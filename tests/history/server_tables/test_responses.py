"""Server tables beside turns: written with them in one transaction, read by another connection."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3

import numpy as np
import pytest

from pensieve_jax.core.errors import (
    ConversationChangedError,
    HistoryError,
    HistoryMismatchError,
    InvalidRequestError,
    UnknownRecordError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import TokenLogprob, Usage
from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import HistoryReader, SQLiteHistoryStore, TurnRecord, codec, open_store
from pensieve_jax.history.server_tables import responses_table, server_conversations
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    ConversationAppend,
    CreateConversation,
    DeleteConversation,
    DeleteItem,
    DeleteResponse,
    EndResponse,
    Expire,
    Idempotency,
    QueueResponse,
    ResponseDraft,
    UpdateConversation,
)
from pensieve_jax.text.reply_parser import ReplyParser

FINGERPRINT = "model:a tokenizer:b"


only_in_a_file = pytest.mark.parametrize("location", ["file"], indirect=True)


@pytest.fixture
def store(read_store):
    return read_store


def turn(parent=None, owner="ann", **fields):
    parent_id, index = (None, 0) if parent is None else (parent.turn_id, parent.turn_index + 1)
    base = TurnRecord(
        "", index, (1, 2, 3), (4, 5), 7, "stop", 1000.0 + index, output_text="ho", owner=owner,
        messages=({"role": "user", "content": "hi"},), turn_id=new_turn_id(parent_id), parent_id=parent_id,
    )  # fmt: skip
    return dataclasses.replace(base, **fields)


def message(item_id, text="hi", role="user"):
    return {"id": item_id, "type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def draft(of, owner="ann", **fields):
    """Return a response to a turn."""
    base = ResponseDraft(
        response_id=f"resp_{of.turn_id}",
        owner=owner,
        request='{"temperature":1}',
        input_items=json.dumps([message("in_1"), message("in_2"), message("in_3")]),
        output_item_id=f"msg_{of.turn_id}",
        created_at_s=990.0,
        expires_at_s=2000.0,
    )
    return dataclasses.replace(base, **fields)


def commit(store, *turns, **fields):
    return store.commit(turns, [draft(one, **fields) for one in turns])


def begin_conversation(store, name="conv_1", owner="ann", *items):
    store.apply(
        CreateConversation(
            owner=owner, conversation_id=name, metadata='{"a":"b"}', created_at_s=5.0, items=json.dumps(items)
        )
    )


def counts(store):
    tables = ("turns", "responses", "items", "conversations", "idempotency")
    return {name: store._connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


def append_to(name="conv_1", version=0, *items):
    return ConversationAppend(conversation_id=name, expected_version=version, items=json.dumps(items))


# --- a turn and its attachments


def test_a_response_is_stored_with_its_turn(store, reader):
    usage = Usage(3, 0, 0, 0, 3, 2)
    one = turn(usage=usage)
    assert commit(store, one) == {}
    record = reader.response("ann", f"resp_{one.turn_id}")
    assert (record.status, record.turn_id, record.completed_at_s) == ("completed", one.turn_id, 1000.0)
    assert (record.output_text, record.finish_reason, record.background) == ("ho", "stop", False)
    assert Usage(**json.loads(record.usage)) == usage
    assert (record.request, record.created_at_s, record.expires_at_s) == ('{"temperature":1}', 990.0, 2000.0)
    assert (record.error, record.job) == (None, None)


@pytest.mark.parametrize("background", [False, True])
def test_log_probabilities_are_stored_with_the_response(store, reader, background):
    """In particular: of no token, of tokens with different numbers of alternatives, and not a number."""
    values = (
        (),
        (TokenLogprob(4, -0.5, {4: -0.5, 2**31 - 1: -3.25}), TokenLogprob(5, -np.inf, {})),
        (TokenLogprob(4, np.float32(-0.1).item(), {}), TokenLogprob(0, -0.0, {3: -1.0})),
        None,
    )
    for logprobs in values:
        one = turn(logprobs=logprobs)
        if background:
            store.apply(QueueResponse(draft=draft(one, background=True), job=b"how to run it"))
        assert commit(store, one, background=background) == {}
        record = reader.response("ann", f"resp_{one.turn_id}")
        found = None if record.logprobs is None else codec.unpack_logprobs(record.logprobs)
        assert found == logprobs and record.job is None
    one = turn(logprobs=(TokenLogprob(4, np.nan, {}),))
    commit(store, one)
    (found,) = codec.unpack_logprobs(reader.response("ann", f"resp_{one.turn_id}").logprobs)
    assert np.isnan(found.logprob)


def test_a_truncated_reply_makes_an_incomplete_response(store, reader):
    one = turn(finish_reason="length")
    commit(store, one)
    assert reader.response("ann", f"resp_{one.turn_id}").status == "incomplete"


def test_a_turn_of_a_conversation_adds_its_items_and_moves_the_head(store, reader):
    begin_conversation(store, "conv_1", "ann", message("first"))
    one = turn()
    commit(store, one, conversation=append_to("conv_1", 0, message("second")))
    row, items = reader.all_items("ann", "conv_1")
    assert [(item.item_id, item.position) for item in items] == [
        *(("first", 0), ("second", 1), (f"msg_{one.turn_id}", 2))
    ]
    assert json.loads(items[2].item) == {
        "id": f"msg_{one.turn_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "ho", "annotations": [], "logprobs": []}],
    }
    assert (row.version, row.metadata, row.created_at_s) == (1, '{"a":"b"}', 5.0)


def test_a_reply_that_cannot_be_divided_is_stored_as_text(store, reader, monkeypatch, caplog):
    """The planted defect of a parser costs neither the turn nor the engine that commits it."""

    def fail(parser, text):
        raise TypeError("unhashable type")

    monkeypatch.setattr(ReplyParser, "feed", fail)
    begin_conversation(store)
    one = turn(template_input=TemplateInput(reply=ReplyFormat(calls="hermes")))
    assert not commit(store, one, conversation=append_to())
    (item,) = reader.all_items("ann", "conv_1")[1]
    assert json.loads(item.item)["content"][0]["text"] == "ho"
    assert f"The reply of turn {one.turn_id} could not be divided" in caplog.text


def test_replies_are_divided_before_the_transaction(store, monkeypatch):
    inside = []

    def packed(item_id, row):
        inside.append(store._connection.in_transaction)
        return original(item_id, row)

    original = server_conversations.packed_reply
    monkeypatch.setattr(server_conversations, "packed_reply", packed)
    begin_conversation(store)
    commit(store, turn(), conversation=append_to())
    assert inside == [False]


def test_only_the_turn_that_lost_a_race_is_refused(store, reader):
    """Two turns with the same version in one step: the first wins, and other turns are not affected."""
    begin_conversation(store)
    first, second, other, named = turn(), turn(), turn(), TurnRecord("bob", 0, (1,), (2,), 0, "stop", 1.0)
    append = append_to("conv_1", 0, message("a"))
    again = append_to("conv_1", 0, message("b"))
    refused = store.commit(
        [first, second, other, named],
        [draft(first, conversation=append), draft(second, conversation=again), draft(other), None],
    )
    assert list(refused) == [1] and isinstance(refused[1], ConversationChangedError)
    assert refused[1].conversation_id == "conv_1"
    assert counts(store) == dict(turns=3, responses=2, items=2, conversations=2, idempotency=0)
    with pytest.raises(UnknownRecordError):
        reader.response("ann", f"resp_{second.turn_id}")
    with pytest.raises(UnknownTurnError):
        store.load_turn("ann", second.turn_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"conversation": append_to("conv_2", 0)},
        {"conversation": append_to("conv_1", 7, message("x"))},
        {"conversation": append_to("conv_1", 0, message("first"))},
        {"conversation": append_to("conv_1", 0, {"role": "user"})},
        {"conversation": ConversationAppend(conversation_id="conv_1", expected_version=0, items="[")},
        {"conversation": ConversationAppend(conversation_id="conv_1", expected_version=0, items="{}")},
        {"idempotency": Idempotency(key="used", body_sha256="y", expires_at_s=9e9)},
        {"idempotency": Idempotency(key="\ud800", body_sha256="y", expires_at_s=9e9)},
        {"request": "\ud800"},
        {"request": None},
        {"owner": "bob"},
        {"response_id": "resp_used"},
        {"background": True},
    ],
    ids=str,
)
def test_an_invalid_attachment_is_refused_with_its_whole_turn(store, fields):
    begin_conversation(store, "conv_1", "ann", message("first"))
    begin_conversation(store, "conv_2", "bob")
    used = turn()
    key = Idempotency(key="used", body_sha256="x", expires_at_s=9e9)
    store.commit([used], [draft(used, idempotency=key, response_id="resp_used")])
    before = counts(store)
    bad, good = turn(), turn()
    refused = store.commit([bad, good], [draft(bad, **fields), draft(good)])
    assert list(refused) == [0]
    assert isinstance(refused[0], InvalidRequestError | UnknownRecordError | ConversationChangedError)
    assert counts(store) == {**before, "turns": 2, "responses": 2}


def test_an_unknown_attachment_is_refused_with_its_turn(store):
    one, named = turn(), TurnRecord("bob", 0, (1,), (2,), 0, "stop", 1.0)
    refused = store.commit([one, named], [object(), draft(one)])
    assert {position: type(error) for position, error in refused.items()} == {
        0: InvalidRequestError,
        1: InvalidRequestError,
    }
    assert counts(store)["turns"] == 0


@only_in_a_file
def test_a_full_disk_stores_neither_turn_nor_response(store, reader):
    begin_conversation(store)
    (num_pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {num_pages}")
    before, one = counts(store), turn()
    large = append_to("conv_1", 0, message("large", "x" * 100_000))
    with pytest.raises(HistoryError, match="nothing of this call was stored"):
        commit(store, turn(), one, conversation=large)
    with pytest.raises(HistoryError, match="nothing of this call was stored"):
        begin_conversation(store, "conv_2", "ann", message("large", "x" * 100_000))
    assert counts(store) == before
    assert reader.conversation("ann", "conv_1").version == 0
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert commit(store, one, conversation=large) == {}


@only_in_a_file
def test_a_file_that_became_read_only_is_an_error_that_loses_nothing(store, reader):
    kept = turn()
    commit(store, kept)
    store._connection.execute("PRAGMA query_only = ON")
    for change in (Expire(now_s=0.0), DeleteResponse(owner="ann", response_id=f"resp_{kept.turn_id}")):
        with pytest.raises(HistoryError, match="nothing of this call was stored"):
            store.apply(change)
    with pytest.raises(HistoryError, match="nothing of this call was stored"):
        commit(store, turn())
    store._connection.execute("PRAGMA query_only = OFF")
    assert reader.response("ann", f"resp_{kept.turn_id}").status == "completed"
    assert commit(store, turn()) == {}


# --- background


def test_a_background_response_is_queued_and_then_completed(store, reader):
    one = turn()
    key = Idempotency(key="k", body_sha256="b", expires_at_s=5000.0)
    background = draft(one, background=True, idempotency=key, body_sha256="b")
    store.apply(QueueResponse(draft=background, job=b"\0job"))
    (queued,) = reader.unfinished_background()
    assert (queued.status, queued.job, queued.turn_id, queued.output_text) == ("queued", b"\0job", None, None)
    assert queued.background and reader.idempotent("ann", "k", 0.0).result_id == queued.response_id
    assert store.commit([one], [background]) == {}
    record = reader.response("ann", queued.response_id)
    assert (record.status, record.turn_id, record.job, record.output_text) == (
        *("completed", one.turn_id, None, "ho"),
    )
    assert reader.unfinished_background() == []


@pytest.mark.parametrize("ends", ["completed", "cancelled", "deleted"])
def test_a_queued_response_keeps_its_parent_turn(store, reader, ends):
    root, before = turn(), turn()
    for one in (root, before):
        commit(store, one)
    child = turn(root)
    queued = draft(child, background=True)
    store.apply(QueueResponse(draft=queued, job=b"", parent_id=root.turn_id))
    record = reader.response("ann", queued.response_id)
    assert (record.turn_id, record.output_text, record.usage) == (None, None, None)
    assert [row.num_turns for row in reader.trees("ann")] == [1, 1]
    for one in (root, before):
        store.apply(DeleteResponse(owner="ann", response_id=f"resp_{one.turn_id}"))
    assert counts(store)["turns"] == 1 and reader.trees("ann") == []
    if ends == "completed":
        assert store.commit([child], [queued]) == {}
        assert len(store.load_turn("ann", child.turn_id).turns) == 2
        return
    if ends == "cancelled":
        store.apply(EndResponse(owner="ann", response_id=queued.response_id, status=ends, completed_at_s=3.0))
        assert reader.response("ann", queued.response_id).turn_id is None
    else:
        store.apply(DeleteResponse(owner="ann", response_id=queued.response_id))
    assert counts(store)["turns"] == 0


def test_nothing_is_queued_behind_a_removed_turn(store):
    child = turn(turn())
    with pytest.raises(UnknownTurnError):
        store.apply(QueueResponse(draft=draft(child, background=True), job=b"", parent_id=child.parent_id))
    assert counts(store)["responses"] == 0


@pytest.mark.parametrize(("status", "error"), [("cancelled", None), ("failed", '{"code":"x"}')])
def test_a_background_response_that_ended_without_a_turn_accepts_none(store, reader, status, error):
    one = turn()
    background = draft(one, background=True)
    store.apply(QueueResponse(draft=background, job=b""))
    end = EndResponse(
        owner="ann", response_id=background.response_id, status=status, completed_at_s=7.0, error=error
    )
    store.apply(end)
    store.apply(dataclasses.replace(end, status="failed", completed_at_s=9.0))  # no effect
    record = reader.response("ann", background.response_id)
    assert (record.status, record.completed_at_s, record.error, record.job) == (status, 7.0, error, None)
    (refused,) = store.commit([one], [background]).values()
    assert isinstance(refused, UnknownRecordError)
    assert counts(store)["turns"] == 0


def test_a_deleted_background_response_does_not_come_back(store, reader):
    one = turn()
    background = draft(one, background=True)
    store.apply(QueueResponse(draft=background, job=b""))
    store.apply(DeleteResponse(owner="ann", response_id=background.response_id))
    assert isinstance(store.commit([one], [background]).get(0), UnknownRecordError)
    assert reader.unfinished_background() == []


def test_an_invalid_end_and_a_used_id_are_refused(store):
    background = draft(turn(), background=True)
    store.apply(QueueResponse(draft=background, job=b""))
    with pytest.raises(InvalidRequestError, match="response_id"):
        store.apply(QueueResponse(draft=background, job=b""))
    with pytest.raises(InvalidRequestError, match="status"):
        store.apply(
            EndResponse(
                owner="ann", response_id=background.response_id, status="completed", completed_at_s=1.0
            )
        )


# --- conversations and items


def test_items_are_added_and_deleted(store, reader):
    begin_conversation(store, "conv_1", "ann", message("a"), message("b"))
    more = AppendItems(
        owner="ann", conversation_id="conv_1", expected_version=0, items=json.dumps([message("c")])
    )
    store.apply(more)
    with pytest.raises(ConversationChangedError):
        store.apply(more)
    store.apply(DeleteItem(owner="ann", conversation_id="conv_1", item_id="b"))
    row, items = reader.all_items("ann", "conv_1")
    assert [item.item_id for item in items] == ["a", "c"] and row.version == 2
    assert json.loads(reader.item("ann", "conv_1", "c").item) == message("c")
    store.apply(UpdateConversation(owner="ann", conversation_id="conv_1", metadata="{}"))
    row = reader.conversation("ann", "conv_1")
    assert (row.metadata, row.version) == ("{}", 2)
    store.apply(DeleteConversation(owner="ann", conversation_id="conv_1"))
    assert counts(store)["items"] == 0
    with pytest.raises(UnknownRecordError):
        reader.conversation("ann", "conv_1")


def test_a_long_conversation_is_deleted_in_batches(store, reader, monkeypatch):
    """One transaction for all of it would delay every turn between two steps."""
    monkeypatch.setattr(server_conversations, "MAX_DELETED_ITEMS", 3)
    size = len(json.dumps(message("i0"), separators=(",", ":")))
    monkeypatch.setattr(server_conversations, "MAX_DELETED_CHARACTERS", 5 * size)
    long = message("long", "x" * 10 * size)
    begin_conversation(store, "conv_1", "ann", *[message(f"i{n}") for n in range(5)], long, message("i6"))
    begin_conversation(store, "conv_2", "ann", message("other"))
    one = turn()
    commit(store, one, conversation=append_to())
    delete = DeleteConversation(owner="ann", conversation_id="conv_1")
    left = ["i0", "i1", "i2", "i3", "i4", "long", "i6"]
    for num_gone in (3, 5, 6):
        version = reader.conversation("ann", "conv_1").version
        store.apply(delete)
        row, items = reader.all_items("ann", "conv_1")
        assert [item.item_id for item in items][: 7 - num_gone] == left[num_gone:]
        assert row.version == version + 1, "an earlier reader finds that it has changed"
        query = "SELECT head_turn FROM conversations WHERE conversation_id = 'conv_1'"
        assert store._connection.execute(query).fetchone()[0] is None
    store.apply(delete)
    with pytest.raises(UnknownRecordError):
        reader.conversation("ann", "conv_1")
    with pytest.raises(UnknownRecordError):
        store.apply(delete)
    assert counts(store)["items"] == 1 and reader.conversation("ann", "conv_2").version == 0


def test_lists_are_paged(store, reader):
    begin_conversation(store, "conv_1", "ann", *[message(f"i{n}") for n in range(5)])

    def ids(**options):
        page = reader.items("ann", "conv_1", **options)
        return [row.item_id for row in page.rows], page.has_more

    assert ids(limit=2) == (["i4", "i3"], True)
    assert ids(limit=2, after="i3") == (["i2", "i1"], True)
    assert ids(limit=2, after="i1") == (["i0"], False)
    assert ids(limit=3, order="asc", after="i1") == (["i2", "i3", "i4"], False)
    with pytest.raises(UnknownRecordError):
        ids(after="i9")
    with pytest.raises(InvalidRequestError, match="order"):
        ids(order="up")
    one = turn()
    commit(store, one)

    def input_ids(**options):
        page = reader.input_items("ann", f"resp_{one.turn_id}", **options)
        return [row.item_id for row in page.rows], page.has_more

    assert input_ids() == (["in_3", "in_2", "in_1"], False)
    assert input_ids(limit=1, after="in_3") == (["in_2"], True)
    assert input_ids(order="asc", limit=2) == (["in_1", "in_2"], True)
    with pytest.raises(UnknownRecordError):
        input_ids(after="in_9")


def test_a_used_conversation_id_is_refused(store):
    begin_conversation(store)
    with pytest.raises(InvalidRequestError, match="conversation_id"):
        begin_conversation(store)


def test_server_and_library_conversations_are_separate(store):
    """Even without owners, neither lists, ends nor continues the other's."""
    begin_conversation(store, "conv_1", "")
    store.commit([TurnRecord("bob", 0, (1,), (2,), 0, "stop", 1.0)])
    assert [info.conversation_id for info in store.conversations()] == ["bob"]
    with pytest.raises(InvalidRequestError, match="a server's conversation"):
        store.commit([TurnRecord("conv_1", 0, (1,), (2,), 0, "stop", 1.0)])
    with pytest.raises(UnknownRecordError):
        store.apply(DeleteConversation(owner="", conversation_id="bob"))


# --- looking up turns and requests


def test_turns_are_found_by_chain_latest_first(store, reader):
    root = turn(chain=b"one", usage=Usage(3, 0, 0, 0, 3, 2))
    left, right = turn(root, chain=b"two", output_text="x"), turn(root, chain=b"two", output_token_ids=(8,))
    strangers = turn(owner="bob", chain=b"two")
    commit(store, root)
    commit(store, left, right)
    commit(store, strangers, owner="bob")
    assert [found[0] for found in reader.find_chain("ann", b"two")] == [right.turn_id, left.turn_id]
    assert [found[0] for found in reader.find_chain("ann", b"two", limit=1)] == [right.turn_id]
    assert reader.find_chain("ann", b"none") == reader.find_chain("ann", b"") == ()
    view = reader.turn("ann", right.turn_id)
    assert (view.parent_id, view.turn_index, view.num_tokens) == (root.turn_id, 1, 9)
    assert (view.output_token_ids, view.output_text, view.chain) == ((8,), "ho", b"two")
    assert view.messages == ({"role": "user", "content": "hi"},)
    path = reader.turn_path("ann", right.turn_id)
    assert [one.turn_id for one in path] == [root.turn_id, right.turn_id]
    assert path[0].usage == root.usage and path[1] == view


def test_requests_are_found_by_key_and_by_body(store, reader):
    one, two = turn(), turn()
    key = Idempotency(key="k", body_sha256="b", expires_at_s=5000.0)
    store.commit([one], [draft(one, idempotency=key, body_sha256="b", created_at_s=990.0)])
    store.commit([two], [draft(two, body_sha256="b", created_at_s=995.0)])
    known = reader.idempotent("ann", "k", now_s=4999.0)
    assert (known.body_sha256, known.result_id) == ("b", f"resp_{one.turn_id}")
    assert reader.idempotent("ann", "k", now_s=5000.0) is None
    assert reader.idempotent("bob", "k", now_s=0.0) is None
    assert reader.by_body("ann", "b", 0.0).turn_id == two.turn_id
    assert reader.by_body("ann", "b", 996.0) is None
    assert reader.by_body("bob", "b", 0.0) is None
    commit(store, turn())
    assert reader.by_body("ann", "", 0.0) is None


def test_an_expired_key_is_free(store, reader):
    one, two = turn(), turn()
    old = Idempotency(key="k", body_sha256="b", expires_at_s=995.0)
    store.commit([one], [draft(one, idempotency=old, created_at_s=990.0)])
    new = Idempotency(key="k", body_sha256="c", expires_at_s=1995.0)
    assert store.commit([two], [draft(two, idempotency=new, created_at_s=995.0)]) == {}
    assert reader.idempotent("ann", "k", 1000.0).body_sha256 == "c"


def test_another_owners_ids_are_as_unknown_as_ids_that_do_not_exist(store, reader):
    begin_conversation(store, "conv_1", "ann", message("a"))
    one = turn()
    commit(store, one)
    response_id = f"resp_{one.turn_id}"
    looks = {
        "response": lambda owner, change="": reader.response(owner, response_id + change),
        "input_items": lambda owner, change="": reader.input_items(owner, response_id + change),
        "conversation": lambda owner, change="": reader.conversation(owner, "conv_1" + change),
        "items": lambda owner, change="": reader.items(owner, "conv_1" + change),
        "item": lambda owner, change="": reader.item(owner, "conv_1", "a" + change),
        "turn": lambda owner, change="": reader.turn(owner, one.turn_id[: 32 - len(change)] + change),
        "turn_path": lambda owner, change="": reader.turn_path(
            owner, one.turn_id[: 32 - len(change)] + change
        ),
        "end": lambda owner, change="": store.apply(
            EndResponse(owner=owner, response_id=response_id + change, status="failed", completed_at_s=1.0)
        ),
        "delete": lambda owner, change="": store.apply(
            DeleteResponse(owner=owner, response_id=response_id + change)
        ),
        "update": lambda owner, change="": store.apply(
            UpdateConversation(owner=owner, conversation_id="conv_1" + change, metadata="{}")
        ),
        "append": lambda owner, change="": store.apply(
            AppendItems(owner=owner, conversation_id="conv_1" + change, expected_version=0, items="[]")
        ),
        "delete item": lambda owner, change="": store.apply(
            DeleteItem(owner=owner, conversation_id="conv_1", item_id="a" + change)
        ),
        "delete conversation": lambda owner, change="": store.apply(
            DeleteConversation(owner=owner, conversation_id="conv_1" + change)
        ),
    }
    before = counts(store)
    for name, look in looks.items():
        for owner, change in (("bob", ""), ("", ""), ("ann", "zz")):
            with pytest.raises((UnknownRecordError, UnknownTurnError)) as raised:
                look(owner, change)
            assert owner not in ("bob",) or "bob" not in str(raised.value), name
    assert counts(store) == before


# --- deleting


def test_a_deleted_response_takes_its_tokens_unless_another_continues_them(store, reader):
    root = turn()
    child = turn(root)
    commit(store, root)
    commit(store, child)
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{root.turn_id}"))
    with pytest.raises(UnknownRecordError):
        reader.response("ann", f"resp_{root.turn_id}")
    assert len(store.load_turn("ann", child.turn_id).turns) == 2
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{child.turn_id}"))
    assert counts(store)["turns"] == 0


def test_a_conversation_keeps_the_tokens_of_deleted_responses(store):
    begin_conversation(store)
    one = turn()
    commit(store, one, conversation=append_to())
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{one.turn_id}"))
    assert counts(store)["turns"] == 1
    store.apply(DeleteConversation(owner="ann", conversation_id="conv_1"))
    assert counts(store)["turns"] == 0


def test_a_deleted_conversation_leaves_its_responses(store, reader):
    begin_conversation(store)
    one = turn()
    commit(store, one, conversation=append_to())
    store.apply(DeleteConversation(owner="ann", conversation_id="conv_1"))
    assert reader.response("ann", f"resp_{one.turn_id}").output_text == "ho"
    assert reader.turn("ann", one.turn_id)


def test_a_conversation_does_not_keep_the_text_of_a_deleted_item(store):
    begin_conversation(store)
    one = turn()
    commit(store, one, conversation=append_to("conv_1", 0, message("secret")))
    store.apply(DeleteItem(owner="ann", conversation_id="conv_1", item_id="secret"))
    assert counts(store)["turns"] == 1  # the response still has it
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{one.turn_id}"))
    assert counts(store)["turns"] == 0


def test_a_head_that_moves_to_another_branch_releases_the_old_one(store):
    begin_conversation(store)
    root = turn()
    old, new = turn(root), turn(root)
    commit(store, root)
    commit(store, old, conversation=append_to())
    commit(store, new, conversation=append_to("conv_1", 1))
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{old.turn_id}"))
    with pytest.raises(UnknownTurnError):
        store.load_turn("ann", old.turn_id)
    assert len(store.load_turn("ann", new.turn_id).turns) == 2


def test_a_durable_turn_without_a_response_survives_a_deleted_response(store):
    """It has neither response nor conversation: it was committed to be found by its text."""
    own = turn()
    child = turn(own)
    store.commit([own])
    commit(store, child)
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{child.turn_id}"))
    assert store.load_turn("ann", own.turn_id).turns == (own,)


def test_a_turn_in_use_stays_until_its_last_continuation_ends(store):
    """A client deletes a response while another turn runs that continues it."""
    root = turn()
    commit(store, root)
    forget = DeleteResponse(owner="ann", response_id=f"resp_{root.turn_id}")
    store.apply(forget, in_use={root.turn_id})
    child = turn(root)
    assert commit(store, child) == {}
    store.apply(Expire(now_s=0.0))
    assert len(store.load_turn("ann", child.turn_id).turns) == 2
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{child.turn_id}"))
    assert counts(store)["turns"] == 0


def test_a_turn_that_was_in_use_is_removed_when_the_turn_that_used_it_was_cancelled(store):
    root = turn()
    commit(store, root)
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{root.turn_id}"), in_use={root.turn_id})
    store.apply(Expire(now_s=0.0), in_use={root.turn_id})
    assert counts(store)["turns"] == 1
    store.apply(Expire(now_s=0.0))
    assert counts(store)["turns"] == 0
    assert store._connection.execute("SELECT * FROM released").fetchall() == []


def test_expired_responses_are_deleted_and_queued_ones_stay(store, reader, monkeypatch):
    monkeypatch.setattr(responses_table, "MAX_EXPIRED", 2)
    turns = [turn() for _ in range(4)]
    for number, one in enumerate(turns):
        key = Idempotency(key=f"k{number}", body_sha256="b", expires_at_s=50.0 + number)
        store.commit([one], [draft(one, expires_at_s=100.0 + number, idempotency=key)])
    queued = draft(turn(), background=True, expires_at_s=1.0)
    store.apply(QueueResponse(draft=queued, job=b""))
    assert not reader.has_expired(Expire(now_s=49.0)) and reader.has_expired(Expire(now_s=50.0))
    store.apply(Expire(now_s=102.0))
    assert reader.has_expired(Expire(now_s=102.0))
    assert counts(store) == dict(turns=2, responses=3, items=0, conversations=0, idempotency=0)
    store.apply(Expire(now_s=102.0))
    assert counts(store) == dict(turns=1, responses=2, items=0, conversations=0, idempotency=0)
    assert reader.response("ann", f"resp_{turns[3].turn_id}").turn_id == turns[3].turn_id
    assert len(reader.unfinished_background()) == 1
    assert not reader.has_expired(Expire(now_s=102.0)) and reader.has_expired(Expire(now_s=103.0))


# --- the reader beside the writer


@only_in_a_file
def test_a_reader_sees_each_commit_and_never_blocks_the_writer(store, reader, monkeypatch):
    """The writer would fail on any lock."""
    store._connection.execute("PRAGMA busy_timeout = 0")
    for number in range(20):
        one = turn()
        commit(store, one)
        assert reader.response("ann", f"resp_{one.turn_id}").turn_id == one.turn_id
        begin_conversation(store, f"conv_{number}")
        assert reader.conversation("ann", f"conv_{number}").version == 0
    store._connection.execute("BEGIN IMMEDIATE")
    assert reader.conversation("ann", "conv_19").version == 0
    store._connection.execute("ROLLBACK")


def test_a_reader_continues_after_the_writer_reopened_the_file(location):
    with open_store(location, fingerprint=FINGERPRINT) as store:
        first = turn()
        commit(store, first)
        reader = HistoryReader(location, fingerprint=FINGERPRINT)
    assert reader.response("ann", f"resp_{first.turn_id}").status == "completed"
    with open_store(location, fingerprint=FINGERPRINT) as store:
        second = turn(first)
        commit(store, second)
        assert len(reader.turn_path("ann", second.turn_id)) == 2
    reader.close()
    reader.close()
    with pytest.raises(HistoryError, match="closed"):
        reader.turn("ann", first.turn_id)


def test_a_reader_cannot_write(reader):
    with pytest.raises(HistoryError, match=r"readonly|read-only"):
        reader._run(lambda connection: connection.execute("DELETE FROM turns"))


def test_a_reader_of_a_missing_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "chats.sqlite"
    with pytest.raises(HistoryError, match="cannot be opened"):
        HistoryReader(path, fingerprint=FINGERPRINT)
    assert not path.exists()
    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as connection:
        connection.execute("CREATE TABLE recipes(name TEXT)")
    with pytest.raises(HistoryMismatchError, match="which is not a history"):
        HistoryReader(tmp_path / "other", fingerprint=FINGERPRINT)
    store = SQLiteHistoryStore(path, fingerprint=FINGERPRINT)
    with store, pytest.raises(HistoryMismatchError, match="model:z"):
        HistoryReader(path, fingerprint="model:z tokenizer:b")


@only_in_a_file
def test_lookups_use_an_index(store):
    """None scans a whole table, however many turns and responses there are."""
    connection = store._connection
    queries: list[str] = []
    connection.set_trace_callback(queries.append)
    begin_conversation(store)
    one = turn(chain=b"x")
    key = Idempotency(key="k", body_sha256="b", expires_at_s=1.0)
    commit(store, one, conversation=append_to(), idempotency=key, body_sha256="b")
    commit(store, turn(one))
    store.load_turn("ann", one.turn_id)
    store.commit([TurnRecord("bob", 0, (1,), (2,), 0, "stop", 1.0)])
    store.load("bob")
    store.fork("bob", "carol", 1)
    store.delete("bob")
    store.apply(DeleteItem(owner="ann", conversation_id="conv_1", item_id=f"msg_{one.turn_id}"))
    store.apply(DeleteConversation(owner="ann", conversation_id="conv_1"))
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{one.turn_id}"))
    store.apply(Expire(now_s=1.0))
    connection.set_trace_callback(None)
    for query in {query for query in queries if query.startswith(("SELECT", "UPDATE", "DELETE", "WITH"))}:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
        scans = [step for step in plan if step.startswith("SCAN")]
        of_few_rows = "released" in query or "ORDER BY rowid DESC LIMIT 1" in query
        assert all(step == "SCAN path" or of_few_rows for step in scans), (query, plan)
