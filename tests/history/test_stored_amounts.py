"""What each owner stores: counted exactly by triggers over any sequence of changes, failures and restarts."""

from __future__ import annotations

import contextlib
import json
import random
import threading

import pytest

from pensieve_jax.core.errors import ConversationChangedError, PensieveError, StorageQuotaError
from pensieve_jax.history import HistoryReader, open_store, postgres_store
from pensieve_jax.history.postgres_connection import PostgresConnection
from pensieve_jax.history.postgres_location import parse
from pensieve_jax.history.server_tables import server_conversations
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    CreateConversation,
    DeleteConversation,
    DeleteItem,
    DeleteResponse,
    EndResponse,
    Expire,
    Idempotency,
    QueueResponse,
    StorageQuota,
    UpdateConversation,
)
from pensieve_jax.history.stored_amounts import NUM_PARTS, ROW_BYTES, StoredAmounts
from tests.history.amounts import check_amounts
from tests.history.conftest import FINGERPRINT
from tests.history.server_tables.test_responses import append_to, commit, draft, message, turn
from tests.seeds import enough, new_seed

KINDS = (
    *("turn", "turn", "turn", "queue", "queue", "end", "complete", "delete", "delete", "conversation"),
    *(
        "items",
        "items",
        "items",
        "item",
        "forget",
        "update",
        "append_turn",
        "expire",
        "named",
        "reopen",
        "fail",
    ),
)
TEXTS = ("", "hi", "\u4e2d\u6587 \U0001f600", "a\0b\x1bc", "x" * 3000)


class Lives:
    """Random changes of a history by several owners. It refuses some of them."""

    def __init__(self, location, seed: int) -> None:
        self.rng = random.Random(seed)
        self.location = location
        self.store = open_store(location, fingerprint=FINGERPRINT)
        self.now_s = 1000.0
        self.turns: dict[str, list] = {"ann": [], "bob": [], "": []}
        self.queued: list = []
        self.responses: list = []
        self.versions: dict[tuple[str, str], int] = {}
        self.num_refused = 0

    def step(self) -> None:
        rng = self.rng
        self.now_s += rng.random()
        owner = rng.choice(("ann", "bob", ""))
        kind = rng.choice(KINDS)
        try:
            getattr(self, kind)(owner)
        except PensieveError:
            self.num_refused += 1

    def _new(self, owner, **fields):
        parents = [one for one in self.turns[owner] if self.store.has_turn(owner, one.turn_id)]
        parent = self.rng.choice([None, *parents])
        return turn(parent, owner, output_text=self.rng.choice(TEXTS), created_at_s=self.now_s, **fields)

    def _key(self, key):
        return Idempotency(key=key, body_sha256="d" * 64, expires_at_s=self.now_s + 20)

    def _draft(self, one, owner, **fields):
        items = json.dumps([message("in_1", self.rng.choice(TEXTS))])
        key = self._key(f"k{self.rng.randrange(5)}")
        return draft(
            one,
            owner,
            input_items=items,
            created_at_s=self.now_s,
            expires_at_s=self.now_s + self.rng.choice((5.0, 500.0)),
            idempotency=self.rng.choice((None, key)),
            **fields,
        )

    def turn(self, owner):
        one = self._new(owner)
        if self.rng.random() < 0.2:
            one = turn(one, owner)  # its parent is missing: it is refused
        attachment = self.rng.choice((None, self._draft(one, owner)))
        if self.store.commit([one], [attachment]) == {}:
            self.turns[owner].append(one)
            self.responses.append((owner, f"resp_{one.turn_id}"))

    def queue(self, owner):
        one = self._new(owner)
        made = self._draft(one, owner, background=True)
        self.store.apply(
            QueueResponse(draft=made, job=b"j" * self.rng.randrange(2000), parent_id=one.parent_id)
        )
        self.queued.append((one, made))
        self.responses.append((owner, made.response_id))

    def complete(self, owner):
        if self.queued:
            one, made = self.queued.pop(self.rng.randrange(len(self.queued)))
            if self.store.commit([one], [made]) == {}:
                self.turns[one.owner].append(one)

    def end(self, owner):
        if self.queued:
            _, made = self.queued.pop()
            error = json.dumps({"message": self.rng.choice(TEXTS)})
            ended = EndResponse(
                owner=made.owner,
                response_id=made.response_id,
                status="failed",
                completed_at_s=1.0,
                error=error,
            )
            self.store.apply(ended)

    def delete(self, owner):
        if self.responses:
            owner, response_id = self.responses.pop(self.rng.randrange(len(self.responses)))
            self.store.apply(DeleteResponse(owner=owner, response_id=response_id))

    def conversation(self, owner):
        name = f"conv_{self.rng.randrange(6)}"
        items = [message(f"i{number}", self.rng.choice(TEXTS)) for number in range(self.rng.randrange(4))]
        self.store.apply(
            CreateConversation(
                owner=owner,
                conversation_id=name,
                metadata=json.dumps({"a": self.rng.choice(TEXTS)}),
                created_at_s=self.now_s,
                items=json.dumps(items),
            )
        )
        self.versions[owner, name] = 0

    def _conversation(self):
        return self.rng.choice([*self.versions, ("ann", "conv_x")])

    def items(self, _):
        owner, name = self._conversation()
        found = [message(f"i{self.rng.randrange(30)}", self.rng.choice(TEXTS)) for _ in range(3)]
        self.store.apply(
            AppendItems(
                owner=owner,
                conversation_id=name,
                expected_version=self.versions.get((owner, name), 0),
                items=json.dumps(found),
                idempotency=self._key(f"k{self.rng.randrange(9)}"),
                name="n",
                appended_at_s=self.now_s,
            )
        )
        self.versions[owner, name] += 1

    def item(self, _):
        owner, name = self._conversation()
        self.store.apply(DeleteItem(owner=owner, conversation_id=name, item_id=f"i{self.rng.randrange(30)}"))
        self.versions[owner, name] += 1

    def update(self, _):
        owner, name = self._conversation()
        metadata = json.dumps({"a": self.rng.choice(TEXTS)})
        self.store.apply(UpdateConversation(owner=owner, conversation_id=name, metadata=metadata))

    def append_turn(self, _):
        owner, name = self._conversation()
        one = self._new(owner)
        version = self.versions.get((owner, name), 0)
        append = append_to(name, version, message(f"t{self.rng.randrange(99)}", self.rng.choice(TEXTS)))
        refused = self.store.commit([one], [self._draft(one, owner, conversation=append)])
        if refused == {}:
            self.turns[owner].append(one)
            self.versions[owner, name] = version + 1
        else:
            raise refused[0]

    def forget(self, _):
        owner, name = self._conversation()
        self.store.apply(DeleteConversation(owner=owner, conversation_id=name))
        self.versions.pop((owner, name), None)

    def expire(self, _):
        self.store.apply(Expire(now_s=self.now_s, idle_s=self.rng.choice((None, 30.0))))

    def named(self, _):
        name = f"named{self.rng.randrange(3)}"
        match self.rng.randrange(3):
            case 0:
                index = {one.conversation_id: one.num_turns for one in self.store.conversations()}.get(
                    name, 0
                )
                self.store.commit(
                    [turn(None, "", conversation_id=name, turn_index=index, turn_id="", messages=None)]
                )
            case 1:
                self.store.truncate(name, 3)
            case 2:
                self.store.delete(name)

    def fail(self, owner):
        """Change much in a transaction that is rolled back at its end."""

        def change(connection):
            connection.execute("DELETE FROM items")
            connection.execute("DELETE FROM responses")
            connection.execute("DELETE FROM turns")
            raise ConversationChangedError("rolled back")

        with pytest.raises(ConversationChangedError):
            self.store.change(change)

    def close(self):
        self.store.close()

    def reopen(self, owner):
        self.close()
        self.store = open_store(self.location, fingerprint=FINGERPRINT)


@pytest.mark.parametrize("portion", [100, 1])
def test_counted_amounts_equal_a_recount_after_any_changes(location, monkeypatch, portion):
    monkeypatch.setattr(server_conversations, "MAX_DELETED_ITEMS", portion)
    lives = Lives(location, new_seed())
    with contextlib.closing(lives):
        seen = set()
        for number in range(enough(250, 3000)):
            lives.step()
            if number % 10 == 0:
                seen |= check_amounts(lives.store).keys()
        check_amounts(lives.store)
        assert seen == {"ann", "bob", ""} and lives.num_refused > 10


def test_when_all_is_deleted_nothing_is_left(read_store, reader):
    one = turn()
    assert commit(read_store, one) == {}
    create(read_store, "conv_1", items=json.dumps([message("a", "\u4e2d" * 100)]))
    assert reader.stored_by("ann").num_conversations == reader.stored_by("ann").num_responses == 1
    assert (
        reader.stored_by("ann").num_bytes > 3 * ROW_BYTES + 300 and reader.stored_by("bob") == StoredAmounts()
    )
    assert reader.stored_by_all() == reader.stored_by("ann")
    read_store.apply(DeleteResponse(owner="ann", response_id=f"resp_{one.turn_id}"))
    read_store.apply(DeleteConversation(owner="ann", conversation_id="conv_1"))
    assert reader.stored_by("ann") == reader.stored_by_all() == StoredAmounts()


def create(store, name, quota=None, **fields):
    base = {"owner": "ann", "metadata": "{}", "created_at_s": 5.0}
    store.apply(CreateConversation(conversation_id=name, quota=quota, **(base | fields)))


def test_a_change_beyond_a_quota_stores_nothing(read_store, reader):
    quota = StorageQuota(conversations=2, responses=1, bytes=4000)
    for name in ("conv_1", "conv_2"):
        create(read_store, name, quota)
    before = reader.stored_by("ann")
    with pytest.raises(
        StorageQuotaError, match="stored conversations of this key are 2; they must be at most 2"
    ):
        create(read_store, "conv_3", quota)
    create(read_store, "conv_1", quota, owner="bob")  # each owner has a quota
    one, other = turn(), turn()
    read_store.apply(QueueResponse(draft=draft(one, background=True), job=b"", quota=quota))
    with pytest.raises(StorageQuotaError, match="stored responses") as raised:
        read_store.apply(QueueResponse(draft=draft(other, background=True), job=b"", quota=quota))
    assert (raised.value.amount, raised.value.stored, raised.value.limit) == ("responses", 1, 1)
    read_store.apply(DeleteResponse(owner="ann", response_id=f"resp_{one.turn_id}"))
    long = json.dumps([message("a", "x" * 4000)])
    append = AppendItems(owner="ann", conversation_id="conv_1", expected_version=0, items=long, quota=quota)
    with pytest.raises(StorageQuotaError, match="stored bytes"):
        read_store.apply(append)
    with pytest.raises(StorageQuotaError, match="stored bytes"):
        metadata = json.dumps({"a": "x" * 4000})
        read_store.apply(
            UpdateConversation(owner="ann", conversation_id="conv_1", metadata=metadata, quota=quota)
        )
    assert reader.stored_by("ann") == before and reader.conversation("ann", "conv_1").metadata == "{}"
    read_store.apply(DeleteConversation(owner="ann", conversation_id="conv_1"))
    create(read_store, "conv_3", quota)


def test_an_owner_beyond_the_quota_may_store_less(read_store, reader):
    create(read_store, "conv_1", metadata=json.dumps({"a": "x" * 4000}))
    quota = StorageQuota(bytes=100)
    read_store.apply(
        UpdateConversation(owner="ann", conversation_id="conv_1", metadata='{"a":"y"}', quota=quota)
    )
    assert reader.conversation("ann", "conv_1").metadata == '{"a":"y"}'


# --- idle conversations


def test_idle_conversations_are_deleted_the_longest_idle_first(read_store, reader, monkeypatch):
    monkeypatch.setattr(server_conversations, "MAX_DELETED_ITEMS", 2)
    for number in range(3):
        items = [message(f"i{item}") for item in range(5)]
        create(read_store, f"conv_{number}", created_at_s=10.0 + number, items=json.dumps(items))
    read_store.commit([turn(None, "", conversation_id="named", turn_id="", created_at_s=1.0)])
    expire = Expire(now_s=112.0, idle_s=100.0, busy=(("ann", "conv_0"),))
    assert not reader.has_expired(Expire(now_s=112.0)) and reader.has_expired(expire)
    while reader.has_expired(expire):
        read_store.apply(expire)
    left = [name for name, *_ in reader.oldest_conversations("ann", 10)]
    assert left == ["conv_0", "conv_2"], "one is busy, and one was idle for exactly 100 s"
    assert read_store.conversations(), "conversations of the library are not a server's"
    check_amounts(read_store)


def test_activity_keeps_a_conversation(read_store, reader):
    for name in ("items", "metadata", "turn", "queued", "idle"):
        create(read_store, name, created_at_s=10.0)
    items = json.dumps([message("a")])
    read_store.apply(
        AppendItems(owner="ann", conversation_id="items", expected_version=0, items=items, appended_at_s=50.0)
    )
    read_store.apply(
        UpdateConversation(owner="ann", conversation_id="metadata", metadata="{}", updated_at_s=50.0)
    )
    one, queued = turn(created_at_s=50.0), turn()
    assert read_store.commit([one], [draft(one, conversation=append_to("turn"))]) == {}
    made = draft(queued, background=True, created_at_s=50.0, conversation=append_to("queued"))
    read_store.apply(QueueResponse(draft=made, job=b""))
    expire = Expire(now_s=100.0, idle_s=60.0)
    while reader.has_expired(expire):
        read_store.apply(expire)
    left = {name for name, *_ in reader.oldest_conversations("ann", 10)}
    assert left == {"items", "metadata", "turn", "queued"}


def test_the_reader_lists_the_oldest_first(location):
    with open_store(location, fingerprint=FINGERPRINT) as store:
        for number in (2, 0, 1):
            create(store, f"conv_{number}", created_at_s=float(number))
            one = turn(created_at_s=float(number))
            assert commit(store, one, created_at_s=float(number)) == {}
        with HistoryReader(location, fingerprint=FINGERPRINT) as reader:
            assert [row[0] for row in reader.oldest_conversations("ann", 2)] == ["conv_0", "conv_1"]
            assert [row[1] for row in reader.oldest_responses("ann", 2)] == [0.0, 1.0]
            assert reader.oldest_responses("bob", 2) == []


def test_servers_that_commit_for_the_same_owners_do_not_deadlock(postgres, monkeypatch):
    """A commit, which may have turns of several owners, holds the rows of their amounts until its end."""
    url, overtaken = postgres.url(), []
    is_overtaken = postgres_store.is_overtaken
    monkeypatch.setattr(
        postgres_store, "is_overtaken", lambda error: is_overtaken(error) and not overtaken.append(error)
    )

    def work(store, owners):
        for _ in range(enough(40, 400)):
            ones = [turn(None, owner) for owner in owners]
            assert store.commit(ones, [draft(one, one.owner) for one in ones]) == {}

    with open_store(url, fingerprint=FINGERPRINT) as one, open_store(url, fingerprint=FINGERPRINT) as other:
        threads = [
            threading.Thread(target=work, args=(store, owners))
            for store, owners in ((one, ["ann", "bob", "cid"]), (other, ["cid", "bob", "ann"]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not overtaken
        assert {found.num_responses for found in check_amounts(one).values()} == {2 * enough(40, 400)}


def test_a_commit_does_not_wait_for_another_one_of_its_owner(postgres):
    """Two servers may commit for one owner at a time; without keys, they always do."""
    url = postgres.url()
    with open_store(url, fingerprint=FINGERPRINT) as store, contextlib.ExitStack() as stack:
        (used,) = store.read(lambda connection: connection.execute("SELECT pg_backend_pid()").fetchone())
        while True:  # the process ids of sessions decide which rows they use
            other = stack.enter_context(contextlib.closing(PostgresConnection(parse(url))))
            (found,) = other.execute("SELECT pg_backend_pid()").fetchone()
            if found % NUM_PARTS != used % NUM_PARTS:
                break
        other.execute("BEGIN")
        other.execute("INSERT INTO items VALUES ('ann', 'conv_1', 0, 'i1', '{}')")
        one = turn()
        assert store.commit([one], [draft(one)]) == {}
        other.execute("COMMIT")
        assert check_amounts(store)["ann"].num_responses == 1
        assert store.change(lambda connection: connection.execute("DELETE FROM items").rowcount) == 1
        check_amounts(store)


def test_refusals_of_a_commit_for_several_owners_keep_their_places(read_store):
    orphan = turn(turn(), "ann")
    ones = [turn(None, "cid"), turn(turn(), "bob"), orphan, turn(None, "ann")]
    refused = read_store.commit(ones, [draft(one, one.owner) for one in ones])
    assert refused.keys() == {1, 2}
    assert [refused[index].turn_id for index in (1, 2)] == [ones[1].parent_id, orphan.parent_id]
