"""Ids, beginning-of-sequence tokens, fingerprints, and tokenizers read from model directories."""

import json
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from model_defs import preset
from pensieve_jax.core.errors import ConfigError, ContextLengthError, InvalidRequestError
from pensieve_jax.text import Tokenizer, byte_tokenizer, load_tokenizer
from tests.text.tokenizer_zoo import NAMES, ZOO, byte_level_backend, metaspace_backend


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_byte_tokenizer_ids_are_bytes(text):
    tokenizer = byte_tokenizer()
    markers = ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
    if not any(marker in text for marker in markers):
        assert tokenizer.encode(text, add_bos=False) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize("name", ["llama-tiny", "opt-tiny"])
def test_byte_tokenizer_and_tiny_presets_agree_on_the_ends(name):
    """Otherwise a chat with a random model could not end at its end marker."""
    tokenizer, config = byte_tokenizer(), preset(name)
    end_ids = (tokenizer.eos_id, *tokenizer.encode("<|end|>", add_bos=False))
    assert (config.bos_token_id, config.eos_token_ids) == (tokenizer.bos_id, end_ids)
    assert tokenizer.vocab_size <= config.vocab_size


def test_byte_tokenizer_fits_the_tiny_presets():
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 262
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.special_ids == frozenset(range(256, 262))
    assert tokenizer.encode("<|end|>", add_bos=False) == [261]
    assert tokenizer.decode([104, 319, 261, 105]) == "hi"


@pytest.mark.parametrize("name", NAMES)
def test_bos_is_added_once_and_only_on_request(name):
    tokenizer = ZOO[name]
    wants_bos = name != "byte_level"  # the only one of them without a post-processor or a setting of its own
    assert tokenizer.wants_bos == wants_bos
    expected = [tokenizer.bos_id] if wants_bos else []
    plain = tokenizer.encode("the cat", add_bos=False)
    assert tokenizer.bos_id not in plain
    assert tokenizer.encode("the cat", add_bos=True) == expected + plain
    assert tokenizer.encode(f"{tokenizer.bos_token}", add_bos=True) == [tokenizer.bos_id]
    assert tokenizer.encode("", add_bos=True) == expected


def test_text_behind_other_text_gets_no_space_of_its_own():
    tokenizer = ZOO["metaspace"]
    assert tokenizer.decode_raw(tokenizer.encode("cat", add_bos=False)) == "cat"
    spelled = [tokenizer.token_text(i) for i in tokenizer.encode("cat", add_bos=False)]
    assert spelled == ["\u2581", "c", "a", "t"]
    after = [tokenizer.token_text(i) for i in tokenizer.encode_after(None, "cat")]
    assert after == ["c", "a", "t"]
    assert tokenizer.encode_after(tokenizer.eos_id, "") == []


def test_truncation_and_padding_of_the_file_are_off():
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("the cat sat on the mat", add_bos=False)) > 4
    assert len(Tokenizer(backend).encode("a", add_bos=False)) == 1


@pytest.mark.parametrize("text", ["\ud800", None, b"a", 3])
def test_invalid_text_is_refused(text):
    with pytest.raises(InvalidRequestError, match="prompt"):
        byte_tokenizer().encode(text, add_bos=False)


def test_the_fingerprint_identifies_the_meaning_of_ids():
    def make(**options):
        return Tokenizer(byte_level_backend(), **{"bos_token": "<s>", "eos_token": "</s>", **options})

    same = make().fingerprint
    assert same == make(chat_template="other").fingerprint
    others = [
        make(bos_token=None),
        make(wants_bos=True),
        Tokenizer(byte_level_backend(("</s>", "<s>")), bos_token="<s>", eos_token="</s>"),
        byte_tokenizer(),
    ]
    assert len({same, *(tokenizer.fingerprint for tokenizer in others)}) == 5


def test_a_bos_outside_the_vocabulary_is_ignored():
    tokenizer = Tokenizer(byte_level_backend(), bos_token="[CLS]", wants_bos=True)
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.wants_bos) == (None, None, False)


# --- model directories


def write(directory, **files):
    for name, value in files.items():
        content = value if isinstance(value, str) else json.dumps(value)
        (directory / name.replace("__", ".")).write_text(content, encoding="utf-8")


def test_a_directory_without_a_tokenizer(tmp_path):
    write(tmp_path, config__json={})
    assert load_tokenizer(tmp_path) is None


def test_tokenizer_json_with_its_configuration(tmp_path):
    metaspace_backend().save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        tokenizer_config__json={
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        },
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.wants_bos) == (1, 2, True)
    assert tokenizer.chat_template == "D"
    assert tokenizer.fingerprint == ZOO["byte_fallback"].fingerprint
    write(tmp_path, tokenizer_config__json={"chat_template": {"tool_use": "T", "default": "O"}})
    assert load_tokenizer(tmp_path).chat_template == "O"
    write(tmp_path, chat_template__jinja="J")
    assert load_tokenizer(tmp_path).chat_template == "J"


def test_special_tokens_map_fills_in_and_add_bos_token_decides(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, special_tokens_map__json={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert load_tokenizer(tmp_path).wants_bos is False
    write(tmp_path, tokenizer_config__json={"add_bos_token": True})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.wants_bos) == ("<s>", "</s>", True)
    assert tokenizer.chat_template is None


def test_vocab_and_merges_stand_in_for_tokenizer_json(tmp_path):
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))
    write(tmp_path, tokenizer_config__json={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    tokenizer = load_tokenizer(tmp_path)
    expected = Tokenizer(backend, bos_token="<s>", eos_token="</s>", wants_bos=True)
    text = "the cat</s> sat w\u00f6rld \u4e2d"
    assert tokenizer.encode(text, add_bos=True) == expected.encode(text, add_bos=True)
    assert tokenizer.decode(expected.encode(text, add_bos=True)) == "the cat sat w\u00f6rld \u4e2d"
    assert tokenizer.fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["tokenizer.model"], "tokenizer.model"),
        (["tokenizer.model.v3"], "tokenizer.model.v3"),
        (["tekken.json"], "tekken.json"),
        (["tekken_240911.json"], "tekken_240911.json"),
        (["qwen.tiktoken"], "qwen.tiktoken"),
        (["sentencepiece.bpe.model"], "sentencepiece.bpe.model"),
        (["vocab.txt"], "vocab.txt"),
        (["vocab.json"], "vocab.json"),
        (["merges.txt"], "merges.txt"),
        (["vocab.json", "tokenizer.model"], "tokenizer.model"),
    ],
)
def test_a_vocabulary_that_is_not_read_is_refused_by_name(tmp_path, files, named):
    """Otherwise the first text would be refused, for want of a tokenizer."""
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"must be tokenizer.json, or vocab.json with merges.txt; write"
    ) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.value == str(tmp_path / named)
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == NUM_BYTE_LEVEL


NUM_BYTE_LEVEL = byte_level_backend().get_vocab_size()


def write_merges(directory, **files):
    byte_level_backend().model.save(str(directory))
    write(directory, **files)


@pytest.mark.parametrize(
    ("model", "config", "digits"),
    [
        ({}, {}, 1),
        ({"model_type": "opt"}, {}, 1),
        ({"model_type": "llama"}, {"tokenizer_class": "GPT2TokenizerFast"}, 1),
        ({"model_type": "qwen3"}, {"tokenizer_class": "GPT2Tokenizer"}, 1),
        ({"model_type": "qwen3"}, {}, 3),
        ({"model_type": "llama"}, {"tokenizer_class": "Qwen2Tokenizer"}, 3),
        ({"model_type": "llama", "tokenizer_class": "Qwen2TokenizerFast"}, {}, 3),
        ({"model_type": "qwen2"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, 3),
        ({"model_type": "llama"}, {}, "that of a llama model"),
        ({"model_type": "opt"}, {"tokenizer_class": "RobertaTokenizer"}, "'RobertaTokenizer'"),
        ({"model_type": "opt"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, "'PreTrainedTokenizerFast'"),
    ],
)
def test_the_class_decides_how_vocab_and_merges_split(tmp_path, model, config, digits):
    """Qwen2's class splits each digit off, GPT-2's keeps a number together; transformers chooses likewise."""
    write_merges(tmp_path, config__json=model, tokenizer_config__json=config)
    if isinstance(digits, int):
        (pieces,) = [load_tokenizer(tmp_path)._backend.pre_tokenizer.pre_tokenize_str("123")]
        assert len(pieces) == digits
        return
    with pytest.raises(ConfigError, match=f"class .* is '?{digits}'?, but must be GPT2Tokenizer or Qwen2"):
        load_tokenizer(tmp_path)


def token(content, **flags):
    return {"content": content, "special": True, **flags}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"added_tokens__json": {"<x>": 7777}}, "added_tokens.json is .*<x>' with id 7777.* gives it, 30"),
        ({"added_tokens__json": {"<x>": "320"}}, "added_tokens.json: '<x>' is '320'"),
        ({"added_tokens__json": [1]}, "added_tokens.json"),
        ({"special_tokens_map__json": "["}, "special_tokens_map.json"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"0": token("<x>")}}}, "<x>' with id 0"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"x": token("<x>")}}}, r"decoder\['x'\]"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"320": {}}}}, r"decoder\['320'\]"),
        ({"tokenizer_config__json": {"added_tokens_decoder": [1]}}, "added_tokens_decoder is"),
        ({"tokenizer_config__json": {"additional_special_tokens": "<x>"}}, "additional_special_tokens"),
        ({"tokenizer_config__json": {"eos_token": ["</s>"]}}, "tokenizer_config.json: eos_token is"),
        ({"tokenizer_config__json": {"pad_token": {"text": "<x>"}}}, "tokenizer_config.json: pad_token is"),
        ({"special_tokens_map__json": {"bos_token": 1}}, "special_tokens_map.json: bos_token is 1"),
        ({"tokenizer_config__json": {"add_bos_token": "no"}}, "add_bos_token is 'no', but must be true, f"),
        ({"tokenizer_config__json": {"add_eos_token": 1}}, "add_eos_token is 1"),
        ({"tokenizer_config__json": {"split_special_tokens": True}}, "split_special_tokens is True"),
        ({"tokenizer_config__json": {"add_prefix_space": "yes"}}, "add_prefix_space is 'yes'"),
    ],
)
def test_settings_that_cannot_be_applied_are_named(tmp_path, files, said):
    write_merges(tmp_path, **files)
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(tmp_path)


def test_an_end_that_is_not_added_to_prompts_is_named(tmp_path, caplog):
    write_merges(tmp_path, tokenizer_config__json={"add_eos_token": True})
    assert load_tokenizer(tmp_path) is not None
    assert "add_eos_token" in caplog.text


@pytest.mark.parametrize("says", [False, True, None])
@pytest.mark.parametrize(
    ("backend", "adds"),
    [(metaspace_backend(), True), (metaspace_backend(False), True), (byte_level_backend(), False)],
)
def test_a_prefix_that_tokenizer_json_decides_otherwise_is_named(tmp_path, caplog, says, backend, adds):
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config__json={"add_prefix_space": says})
    load_tokenizer(tmp_path)
    assert ("add_prefix_space" in caplog.text) == (says is not None and says != adds)


@pytest.mark.parametrize("says", [False, True, None])
@pytest.mark.parametrize("adds", [False, True])
def test_add_bos_token_overrides_the_post_processor(tmp_path, says, adds):
    metaspace_backend(bos_by_processor=adds).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config__json={"bos_token": "<s>", "add_bos_token": says})
    wanted = adds if says is None else says
    assert (load_tokenizer(tmp_path).encode("a", add_bos=True)[0] == 1) == wanted


def test_the_post_processors_token_counts_without_a_name(tmp_path):
    """A directory may have tokenizer.json alone, or name another token as bos."""
    metaspace_backend().save(str(tmp_path / "tokenizer.json"))
    for config in ({}, {"bos_token": "</s>"}):
        write(tmp_path, tokenizer_config__json=config)
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.first_id, tokenizer.wants_bos) == (1, True)
        assert tokenizer.encode("a", add_bos=True)[0] == 1
        assert tokenizer.encode("<s>", add_bos=True) == [1]


def test_special_tokens_keep_their_flags(tmp_path):
    """White space beside such a token belongs to it; a plain mark as special would give it to the text."""
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<end>", rstrip=True, lstrip=True), AddedToken("<pad>", rstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        tokenizer_config__json={"eos_token": "<end>"},
        special_tokens_map__json={"eos_token": "<end>", "pad_token": "<pad>"},
    )
    tokenizer = load_tokenizer(tmp_path)
    ids = [NUM_BYTE_LEVEL, NUM_BYTE_LEVEL + 1]
    assert tokenizer.eos_id == ids[0] and tokenizer.special_ids >= {*ids}
    assert tokenizer.encode(" <end> <pad> ", add_bos=False) == ids


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": "{"},
        {"tokenizer__json": "{}"},
        {"vocab__json": "[]", "merges__txt": "a b"},
        {"tokenizer_config__json": "nonsense"},
        {"tokenizer_config__json": "[1]"},
        {"tokenizer_config__json": "[" * 100_000},
    ],
)
def test_unreadable_files_are_named(tmp_path, files):
    write(tmp_path, **files)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_an_error_shows_the_first_forty_characters_of_a_file(tmp_path):
    content = "".join(chr(0x100 + place) for place in range(60))
    write(tmp_path, tokenizer__json=content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.field == str(tmp_path / "tokenizer.json")
    assert caught.value.value == content[:40]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_utf_8_is_named(tmp_path, name):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a UTF-8 text file \(.*invalid start byte") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.field == str(tmp_path / name)


@pytest.mark.parametrize("name", NAMES)
def test_long_text_has_the_ids_of_any_text(name):
    """The library's fast batches equal its single calls."""
    tokenizer = ZOO[name]
    text = "Hello there, Straße 42! " * 400
    expected = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_bos=False) == expected
    assert tokenizer.decode_raw(expected) == tokenizer._backend.decode(expected, skip_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode(text + "\ud800", add_bos=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_text_that_is_refused_unread_would_be_too_long(name, seed):
    """Accepted text has the same ids as without a limit; white space and repeated words give few ids."""
    rng, tokenizer = random.Random(seed), ZOO[name]
    print(f"seed {seed}")
    pieces = ["Hello there", " ", "    " * 50, "x" * 300, "Straße 42!", "\U0001f600", "\n", "</s>"]
    text = "".join(rng.choices(pieces, [rng.random() ** 3 for _ in pieces], k=rng.choice([10, 1000, 5000])))
    token_limit = rng.choice([1, 100, 5000])
    whole = tokenizer.encode(text, add_bos=True)
    try:
        assert tokenizer.encode(text, add_bos=True, token_limit=token_limit) == whole
    except ContextLengthError as error:
        assert len(whole) > token_limit
        assert (error.field, error.limit) == ("prompt", f"at most {token_limit} tokens")


@pytest.mark.parametrize("text", ["a", " " * 40 + "a"])
def test_only_the_beginning_of_a_much_too_long_text_is_read(monkeypatch, text):
    tokenizer, lengths, encode = ZOO["byte_level"], [], Tokenizer._encode

    def noted(self, text, token_limit=None):
        lengths.append(0 if token_limit else len(text))
        return encode(self, text, token_limit)

    monkeypatch.setattr(Tokenizer, "_encode", noted)
    for call in (
        lambda: tokenizer.encode(text * 1_000_000, add_bos=True, token_limit=10),
        lambda: tokenizer.encode_after(None, text * 1_000_000, token_limit=10),
    ):
        with pytest.raises(ContextLengthError, match="at most 10 tokens"):
            call()
    assert 0 < max(lengths) < 100_000


@pytest.mark.parametrize(
    "work",
    [
        lambda tokenizer: tokenizer.encode("a b " * 300_000, add_bos=False),
        lambda tokenizer: tokenizer.decode_raw([97] * 1_000_000),
    ],
    ids=["encode", "decode"],
)
def test_other_threads_run_during_tokenization(work):
    """If a call kept the GIL, the other thread's count would not advance."""
    tokenizer, ended, ticks = byte_tokenizer(), threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        work(tokenizer)
        assert ticks - before >= 5
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("previous_id", "encoded"), [(None, "<unk>cat"), (9, "<unk>cat"), (1, "<s>cat"), (2, "</s>cat")]
)
def test_text_is_encoded_after_the_preceding_special_token(monkeypatch, previous_id, encoded):
    """After any other id it is encoded as after the special token with the lowest id."""
    tokenizer, texts, encode = ZOO["metaspace"], [], Tokenizer._encode
    monkeypatch.setattr(
        Tokenizer,
        "_encode",
        lambda self, text, token_limit: (texts.append(text), encode(self, text, token_limit))[1],
    )
    ids = tokenizer.encode_after(previous_id, "cat")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["c", "a", "t"]
    assert texts == [encoded]


def test_without_special_tokens_text_is_encoded_alone():
    backend = byte_level_backend(())
    tokenizer = Tokenizer(backend)
    assert tokenizer.special_ids == frozenset()
    assert tokenizer.encode_after(None, "the cat") == backend.encode("the cat").ids
    assert tokenizer.encode_after(None, "") == []


def test_empty_text_is_not_encoded_behind_a_special_token(monkeypatch):
    tokenizer, texts, encode = ZOO["metaspace"], [], Tokenizer._encode
    monkeypatch.setattr(
        Tokenizer,
        "_encode",
        lambda self, text, token_limit: (texts.append(text), encode(self, text, token_limit))[1],
    )
    assert tokenizer.encode_after(2, "") == []
    assert texts == [""]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_before_another_id_is_of_plain_letters(name):
    tokenizer = ZOO[name]
    anchor_letter_id = tokenizer._anchor_letter_id
    assert anchor_letter_id is not None
    text = tokenizer.decode_window([anchor_letter_id])
    assert text.isascii() and text.isalpha()
