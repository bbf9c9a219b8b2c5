"""Two lists of ids are compared by their text, however it is divided."""

import random

import pytest

from pensieve_jax.text import Tokenizer
from pensieve_jax.text.shared_text import shared_text
from tests.seeds import new_seed
from tests.text.tokenizer_zoo import byte_level_backend, metaspace_backend

TEXTS = ("the cat sat on the mat, ", "héllo wörld ", "中文\U0001f642", "<s>", " the end.", "\n\n", "did not")


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_token="<s>")


def divided(tokenizer: Tokenizer, texts: list[str], draw: random.Random) -> list[int]:
    """Return ids of the joined texts that are divided at more places than the tokenizer would."""
    first = tokenizer.encode(texts[0], add_bos=False)
    pieces: list[str] = []
    for text in texts[1:]:
        cut = draw.randrange(len(text)) if text != "<s>" else 0
        pieces += [text[:cut], text[cut:]]
    return [*first, *(i for piece in pieces for i in tokenizer.encode_after(None, piece))]


def test_ids_that_are_divided_differently_spell_the_same_text() -> None:
    draw, num_divided, tokenizer = random.Random(new_seed()), 0, byte_level()
    for _ in range(100):
        texts = draw.choices(TEXTS, k=6)
        wanted = tokenizer.encode("".join(texts), add_bos=False)
        known = divided(tokenizer, texts, draw)
        num_divided += known != wanted
        assert tokenizer.decode_raw(known) == tokenizer.decode_raw(wanted)
        assert shared_text(known, wanted, tokenizer.decode_raw) == (len(known), len(wanted))
    assert num_divided > 50


def test_the_shared_part_ends_where_the_texts_part() -> None:
    draw, tokenizer = random.Random(new_seed()), byte_level()
    for _ in range(100):
        begun, one, other = draw.choices(TEXTS, k=5), *draw.sample(TEXTS, 2)
        wanted = tokenizer.encode("".join([*begun, one]), add_bos=False)
        known = divided(tokenizer, [*begun, other], draw)
        num_known, num_wanted = shared_text(known, wanted, tokenizer.decode_raw)
        assert tokenizer.decode_raw(known[:num_known]) == tokenizer.decode_raw(wanted[:num_wanted])
        if num_known < len(known) and num_wanted < len(wanted):
            assert known[num_known] != wanted[num_wanted]


def test_a_space_before_a_word_counts_although_decoders_drop_it_at_the_start() -> None:
    tokenizer = Tokenizer(metaspace_backend(), bos_token="<s>")
    ids = {
        piece: tokenizer._backend.token_to_id(piece)
        for piece in ("\u2581the", "\u2581", "th", "e", "\u2581a")
    }
    wanted = [ids["\u2581a"], ids["\u2581the"]]
    spelled = [ids["\u2581a"], ids["\u2581"], ids["th"], ids["e"]]
    assert shared_text(spelled, wanted, tokenizer.decode_raw) == (4, 2)
    without_space = [ids["\u2581a"], ids["th"], ids["e"]]
    assert shared_text(without_space, wanted, tokenizer.decode_raw) == (1, 1)


@pytest.mark.parametrize(
    ("known", "wanted", "shared"),
    [
        ([], [], (0, 0)),
        ([], [1], (0, 0)),
        ([1], [], (0, 0)),
        ([1, 2], [1, 2], (2, 2)),
        ([1, 2, 3], [1, 2, 4], (2, 2)),
        ([1, 2, 2], [1, 5, 3], (3, 2)),  # bb is also one id
        ([1, 5], [1, 2, 3], (1, 1)),  # only its first letter is wanted
        ([1, 6, 7, 3], [1, 8, 3], (4, 3)),  # a character of two bytes
        ([1, 6, 3], [1, 8, 3], (1, 1)),  # half a character is not shared
        ([1, 6, 3], [1, 6, 4], (2, 2)),
        ([6, 7], [8], (2, 1)),
        ([1, 9, 9], [1, 6, 6], (1, 1)),  # other bytes of broken characters
        ([1, 0, 2, 0, 0], [1, 2, 3], (5, 2)),  # 0 has no text
    ],
)
def test_ids_meet_at_boundaries_of_both(known: list[int], wanted: list[int], shared: tuple[int, int]) -> None:
    spelled = {
        0: b"",
        1: b"a",
        2: b"b",
        3: b"c",
        4: b"d",
        5: b"bb",
        6: b"\xc3",
        7: b"\xa9",
        8: b"\xc3\xa9",
        9: b"\x80",
    }

    def decode(token_ids) -> str:
        return b"".join(spelled[token_id] for token_id in token_ids).decode(errors="replace")

    assert shared_text(known, wanted, decode) == shared


def test_long_runs_without_a_common_boundary_are_given_up() -> None:
    calls = []

    def decode(token_ids) -> str:
        calls.append(len(token_ids))
        return "".join("aaa" if token_id == 1 else "aa" for token_id in token_ids)[: 10**6]

    # Every sixth letter both have a boundary, so all of it is shared.
    assert shared_text([1] * 200, [2] * 300, decode) == (200, 300)
    assert max(calls) < 10
    calls.clear()
    texts = {1: "ab" * 200, 2: "ab", 3: "x"}
    found = shared_text([1, 3], [2] * 200, lambda ids: "".join(texts[one] for one in ids))
    assert found == (0, 0), "they meet only after 200 ids"
