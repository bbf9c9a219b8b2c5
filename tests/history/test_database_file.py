"""Locks, kills, damage and files of other programs."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys

import pytest

import pensieve_jax
from pensieve_jax.core.errors import (
    HistoryCorruptError,
    HistoryError,
    HistoryLockedError,
    HistoryMismatchError,
    HistoryMissingError,
)
from pensieve_jax.history import HistoryReader, SQLiteHistoryStore, TurnRecord, database, opening
from pensieve_jax.history.connection import SQLiteConnection

FINGERPRINT = "model:a tokenizer:b"
# The child processes import the history alone: the whole package would take each of them seconds.
PREAMBLE = (
    "import sys, types\n"
    "package = sys.modules['pensieve_jax'] = types.ModuleType('pensieve_jax')\n"
    f"package.__path__ = {list(pensieve_jax.__path__)!r}\n"
)


def turn(index=0, conversation_id="alice", num_tokens=300):
    return TurnRecord(conversation_id, index, tuple(range(num_tokens)), (7,), index, "stop", float(index))


def open_store(path, **options):
    return SQLiteHistoryStore(path, **{"fingerprint": FINGERPRINT, **options})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chats.sqlite"


@pytest.fixture
def filled(path):
    with open_store(path) as store:
        store.commit([turn(index) for index in range(40)])
    return path


def start_child(code, path, **pipes):
    code = (
        PREAMBLE + "from pensieve_jax.history import SQLiteHistoryStore, TurnRecord\n"
        f"store = SQLiteHistoryStore(sys.argv[1], fingerprint={FINGERPRINT!r})\n" + code
    )
    return subprocess.Popen([sys.executable, "-c", code, os.fspath(path)], stdout=subprocess.PIPE, **pipes)


# --- a file that must exist


@pytest.mark.parametrize("what", ["missing", "empty", "its directory is missing", "there is a log of it"])
def test_a_missing_history_is_reported_and_not_created(tmp_path, what):
    path = tmp_path / "directory" / "chats.sqlite"
    if what != "its directory is missing":
        path.parent.mkdir()
    if what == "empty":
        path.touch()
    if what == "there is a log of it":
        path.with_name(path.name + "-wal").write_bytes(b"x" * 100)
    before = {file: file.stat().st_size for file in tmp_path.rglob("*")}
    with pytest.raises(HistoryMissingError, match=f"'{path}', which is missing or empty"):
        open_store(path, may_make=False)
    assert {file: file.stat().st_size for file in tmp_path.rglob("*")} == before


def test_an_existing_history_need_not_be_created(filled):
    with open_store(filled, may_make=False) as store:
        assert len(store.load("alice").turns) == 40
    with open_store(None, may_make=False) as store:  # in memory each is new
        assert store.conversations() == []


# --- the lock


def test_a_second_open_in_this_process_is_refused_and_the_first_continues(path):
    with open_store(path) as store:
        with pytest.raises(HistoryLockedError, match=rf"chats\.sqlite.*process {os.getpid()} "):
            open_store(path)
        store.commit([turn()])
    with open_store(path) as store:
        assert len(store.load("alice").turns) == 1


def test_another_name_of_the_same_file_has_the_same_lock(path, tmp_path):
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    with open_store(path), pytest.raises(HistoryLockedError):
        open_store(link)


def test_another_process_holds_the_lock_until_it_is_killed(path):
    child = start_child("print('ready', flush=True)\nsys.stdin.read()\n", path, stdin=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(HistoryLockedError, match=f"process {child.pid} has open"):
            open_store(path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    open_store(path).close()


def test_a_file_that_another_program_is_writing_is_locked(filled, monkeypatch):
    from pensieve_jax.history import database

    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.05)
    with contextlib.closing(sqlite3.connect(filled, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(HistoryLockedError, match="another program"):
            open_store(filled)
        other.execute("ROLLBACK")
    open_store(filled).close()


# --- permissions


def test_a_new_history_is_private_and_an_old_one_keeps_its_mode(path):
    before = os.umask(0)
    try:
        with open_store(path) as store:
            store.commit([turn()])
            names = ("", "-wal", "-shm", ".lock")
            modes = {name: os.stat(f"{path}{name}").st_mode & 0o777 for name in names}
            assert modes == dict.fromkeys(names, 0o600)
        path.chmod(0o640)
        with open_store(path) as store:
            store.commit([turn(1)])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


# --- kill -9


def test_an_acknowledged_commit_survives_a_kill(path):
    # Each commit holds one turn of two conversations and is reported only once it has returned. The parent
    # kills the child while it keeps committing, so the kill falls inside or between later commits.
    child = start_child(
        "for index in range(100_000):\n"
        "    turns = [TurnRecord(name, index, tuple(range(300)), (7,), 1, 'stop', 0.0) for name in 'ab']\n"
        "    store.commit(turns)\n"
        "    print(index, flush=True)\n",
        path,
    )
    acknowledged = -1
    while acknowledged < 50:
        acknowledged = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate()
    acknowledged = max([acknowledged, *(int(line) for line in rest.split(b"\n")[:-1])])
    assert child.returncode == -signal.SIGKILL
    with open_store(path) as store:
        num_turns = {info.conversation_id: info.num_turns for info in store.conversations()}
        assert num_turns["a"] == num_turns["b"]
        assert num_turns["a"] in (acknowledged + 1, acknowledged + 2)
        assert store.load("a").token_ids.tolist() == [*range(300), 7] * num_turns["a"]
        store.commit([turn(num_turns["a"], "a")])


def test_a_kill_inside_a_transaction_leaves_none_of_it(path):
    child = start_child(
        "import os, signal\n"
        "from pensieve_jax.history import table_store\n"
        "make = lambda name: TurnRecord(name, 0, tuple(range(300)), (7,), 0, 'stop', 0.0)\n"
        "store.commit([make('kept')])\n"
        "append = table_store.append\n"
        "def killed(connection, commit, *rest):\n"
        "    append(connection, commit, *rest)\n"
        "    if commit.conversation_id == 'second':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "table_store.append = killed\n"
        "store.commit([make('first'), make('second'), make('third')])\n",
        path,
    )
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    with open_store(path) as store:
        assert [info.conversation_id for info in store.conversations()] == ["kept"]


def test_a_kill_while_the_file_is_created_leaves_a_usable_path(path):
    # The process dies in the transaction that creates the tables: the next open starts over.
    code = (
        PREAMBLE + "import os, signal\n"
        "from pensieve_jax.history import SQLiteHistoryStore, database, schema\n"
        "schema.newest_columns = dict\n"
        "schema.TABLES += ('SELECT die()',)\n"
        "connect = database._connect\n"
        "def dying(path):\n"
        "    connection = connect(path)\n"
        "    connection.execute('PRAGMA cache_size = 1')\n"  # spills pages into the file before the commit
        "    connection.create_function('die', 0, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "    return connection\n"
        "database._connect = dying\n"
        f"SQLiteHistoryStore(sys.argv[1], fingerprint={FINGERPRINT!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, os.fspath(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with open_store(path) as store:
        store.commit([turn()])


# --- files of another owner


def test_another_model_is_refused_with_both_names_and_the_file_stays(filled):
    before, names = filled.read_bytes(), sorted(filled.parent.iterdir())
    with pytest.raises(HistoryMismatchError, match=r"'model:a tokenizer:b'.*'model:z tokenizer:b'"):
        open_store(filled, fingerprint="model:z tokenizer:b")
    assert filled.read_bytes() == before and sorted(filled.parent.iterdir()) == names
    with open_store(filled) as store:
        assert len(store.load("alice").turns) == 40


@pytest.mark.parametrize("journal_mode", ["DELETE", "WAL"])
def test_a_database_of_another_application_is_not_changed(path, tmp_path, journal_mode):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal_mode}")
        connection.execute("CREATE TABLE recipes(name TEXT)")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(HistoryMismatchError, match="another application"):
        open_store(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b'{"turns": []}\n', b"S", b"not a database!!" + bytes(9000)])
def test_a_file_that_is_not_a_database_is_not_changed(path, tmp_path, content):
    path.write_bytes(content)
    with pytest.raises(HistoryMismatchError, match="is not a history file; give another path"):
        open_store(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_database_of_another_application_is_not_changed(path, tmp_path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes(name TEXT)")
        connection.executemany("INSERT INTO recipes VALUES (?)", [("soup" * 200,)] * 100)
        connection.commit()
    truncated(path)
    content = path.read_bytes()
    with pytest.raises(HistoryMismatchError, match="another application"):
        open_store(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_path_keeps_an_existing_lock_file(filled):
    lock = filled.with_name("chats.sqlite.lock")
    assert lock.exists()
    with pytest.raises(HistoryMismatchError):
        open_store(filled, fingerprint="model:z tokenizer:b")
    assert lock.exists()


def test_a_directory_is_refused_without_a_trace(tmp_path):
    (tmp_path / "chats").mkdir()
    with pytest.raises(HistoryError, match="Is a directory"):
        open_store(tmp_path / "chats")
    assert list(tmp_path.iterdir()) == [tmp_path / "chats"]


def test_a_lock_on_a_file_that_was_deleted_meanwhile_is_taken_again(path, monkeypatch):
    """Between one process's open and lock, another one releases its lock and removes the file."""
    from pensieve_jax.history import lock

    first, take = lock.FileLock(path), lock._lock

    def late(file_descriptor, locked_path):
        first.discard()
        take(file_descriptor, locked_path)

    monkeypatch.setattr(lock, "_lock", late)
    second = lock.FileLock(path)
    monkeypatch.undo()
    with pytest.raises(HistoryLockedError):
        lock.FileLock(path)
    second.release()


@pytest.mark.parametrize("version", [1, 9])
def test_another_schema_version_is_refused(filled, version):
    with contextlib.closing(sqlite3.connect(filled)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before, names = filled.read_bytes(), sorted(filled.parent.iterdir())
    words = f"schema version {version}, .* version 4; use the release"
    with pytest.raises(HistoryMismatchError, match=words):
        open_store(filled)
    assert filled.read_bytes() == before and sorted(filled.parent.iterdir()) == names
    with pytest.raises(HistoryMismatchError, match=words):
        HistoryReader(filled, fingerprint=FINGERPRINT)
    assert filled.read_bytes() == before


def test_a_read_only_file_can_be_read_and_loses_nothing(filled, monkeypatch):
    """The lock can be taken, as on a file system that is mounted read-only."""
    monkeypatch.setattr(
        database,
        "_connect",
        lambda path: sqlite3.connect(
            f"file:{path}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            factory=SQLiteConnection,
        ),
    )
    with open_store(filled) as store:
        with pytest.raises(HistoryError, match=r"readonly.*nothing of this call was stored"):
            store.commit([turn(40)])
        assert len(store.load("alice").turns) == 40
    monkeypatch.undo()
    with open_store(filled) as store:
        assert len(store.load("alice").turns) == 40


def test_a_refused_history_keeps_the_log_of_a_killed_process(filled, tmp_path):
    """Only the log has its commits."""
    copy = copy_with_log(filled, tmp_path)
    before, log = copy.read_bytes(), copy.with_name("chats.sqlite-wal").read_bytes()
    with pytest.raises(HistoryMismatchError):
        open_store(copy, fingerprint="model:z tokenizer:b")
    assert copy.read_bytes() == before and copy.with_name("chats.sqlite-wal").read_bytes() == log != b""
    with open_store(copy) as store:
        assert len(store.load("alice").turns) == 41


def test_a_refused_database_that_another_program_writes_stays_complete(path, tmp_path):
    """Its log is in use while ours would be deleted; the commit in it survives."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE recipes(name TEXT)")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with pytest.raises(HistoryMismatchError, match="another application"):
            open_store(path)
        other.execute("INSERT INTO recipes VALUES ('soup')")
        assert path.with_name("chats.sqlite-wal").stat().st_size > 0
        shutil.copytree(tmp_path, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy" / path.name)) as copy:
        assert copy.execute("SELECT name FROM recipes").fetchall() == [("soup",)]


def test_an_empty_file_becomes_a_history(path):
    path.touch()
    with open_store(path) as store:
        store.commit([turn()])


# --- damage


def garbage_header(path):
    content = bytearray(path.read_bytes())
    content[16:32] = b"not a database!!"
    path.write_bytes(content)


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def truncated_within_the_header(path):
    path.write_bytes(path.read_bytes()[:60])


def scrambled_pages(path):
    content = bytearray(path.read_bytes())
    content[4096 : 4 * 4096] = bytes(range(256)) * (3 * 16)
    path.write_bytes(content)


def sql(*statements):
    def damage(path):
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)

    return damage


DAMAGES = {
    "garbage_header": garbage_header,
    "truncated": truncated,
    "truncated_within_the_header": truncated_within_the_header,
    "scrambled_pages": scrambled_pages,
    "missing_table": sql("DROP TABLE turns"),
    "wrong_column": sql("ALTER TABLE turns RENAME COLUMN seed TO grain"),
    "no_fingerprint": sql("DELETE FROM meta"),
    "odd_blob": sql("PRAGMA ignore_check_constraints = 1", "UPDATE turns SET prompt_ids = x'01'"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_set_aside_unchanged_and_a_new_one_starts(filled, tmp_path, damage):
    damage(filled)
    content = filled.read_bytes()
    target = tmp_path / "chats.sqlite.corrupt-1"
    with pytest.raises(HistoryCorruptError, match=r"chats\.sqlite.*moved to .*chats\.sqlite\.corrupt-1'"):
        open_store(filled)
    assert target.read_bytes() == content
    assert not filled.exists()
    with open_store(filled) as store:
        assert store.conversations() == []
    assert target.read_bytes() == content


def test_files_that_were_set_aside_are_not_overwritten(filled, tmp_path):
    (tmp_path / "chats.sqlite.corrupt-1").write_bytes(b"older")
    (tmp_path / "chats.sqlite.corrupt-2-wal").write_bytes(b"older log")
    truncated_within_the_header(filled)
    content = filled.read_bytes()
    with pytest.raises(HistoryCorruptError, match="corrupt-3"):
        open_store(filled)
    assert (tmp_path / "chats.sqlite.corrupt-1").read_bytes() == b"older"
    assert (tmp_path / "chats.sqlite.corrupt-2-wal").read_bytes() == b"older log"
    assert (tmp_path / "chats.sqlite.corrupt-3").read_bytes() == content


def copy_with_log(filled, tmp_path):
    """Copy a history as a kill leaves it: recent commits are only in the write-ahead log."""
    copy = tmp_path / "killed" / "chats.sqlite"
    copy.parent.mkdir()
    with open_store(filled) as store:
        store.commit([turn(40)])
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(f"{filled}{suffix}", f"{copy}{suffix}")
    return copy


def test_the_log_of_a_killed_process_is_read(filled, tmp_path):
    with open_store(copy_with_log(filled, tmp_path)) as store:
        assert len(store.load("alice").turns) == 41


def test_the_log_moves_with_a_damaged_file(filled, tmp_path):
    copy = copy_with_log(filled, tmp_path)
    scrambled_pages(copy)
    files = {suffix: copy.with_name(copy.name + suffix).read_bytes() for suffix in ("", "-wal")}
    assert files["-wal"]
    with pytest.raises(HistoryCorruptError):
        open_store(copy)
    for suffix, content in files.items():
        assert copy.with_name(f"chats.sqlite.corrupt-1{suffix}").read_bytes() == content
        assert not copy.with_name(copy.name + suffix).exists()
    with open_store(copy) as store:
        assert store.conversations() == []


@pytest.mark.parametrize("leave", ["nothing", "an empty file"])
def test_a_log_without_its_database_is_kept(filled, tmp_path, leave):
    copy = copy_with_log(filled, tmp_path)
    log = copy.with_name("chats.sqlite-wal").read_bytes()
    copy.unlink()
    if leave == "an empty file":
        copy.touch()
    with pytest.raises(HistoryCorruptError, match="write-ahead log"):
        open_store(copy)
    assert copy.with_name("chats.sqlite.corrupt-1-wal").read_bytes() == log
    open_store(copy).close()


def test_a_failed_open_releases_the_lock(filled):
    scrambled_pages(filled)
    for _ in range(2):
        with contextlib.suppress(HistoryCorruptError):
            open_store(filled).close()
    with open_store(filled) as store:
        store.commit([turn()])


def test_only_a_database_server_must_be_reachable(tmp_path, monkeypatch):
    needed: list[str] = []

    def need(url: str) -> None:
        needed.append(url)
        raise HistoryError("planted")

    monkeypatch.setattr(opening, "need_psycopg", need)
    opening.check_reachable(tmp_path / "missing" / "history.sqlite")
    with pytest.raises(HistoryError, match="planted"):
        opening.check_reachable("postgresql://me@host/chats")
    assert needed == ["postgresql://me@host/chats"]
