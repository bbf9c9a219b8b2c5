"""Make tests/text/golden: small tokenizer directories of several kinds, read by transformers.

The script needs transformers (without torch), which the project does not. Run it in a separate environment:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install transformers absl-py
    /tmp/golden/bin/python scripts/dev/make_golden_tokenizers.py

Each kind is a directory of the files that a checkpoint has, and cases.json. That holds what `AutoTokenizer`
makes of texts: `ids`, with a beginning-of-sequence token if it adds one. And it holds what it makes of ids:
`text` without special tokens, and `raw` with them.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer

FLAGS = flags.FLAGS
CORPUS = [
    "the cat sat on the mat, the dog did not; it's 12345 o'clock.",
    "h\u00e9llo w\u00f6rld \u4e2d\u6587 \U0001f642 the end.\n\nThe second line, we're here.",
] * 3
TEXTS = [
    "",
    " ",
    "the cat",
    " the cat",
    "the  cat \n\n sat\t.",
    "It's 12345, we'RE 3.14",
    "w\u00f6rld \u4e2d\u6587\U0001f642",
    "e\u0301 is not \u00e9",
    "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n",
    "the <|im_end|> cat",
    "</s>the</s> cat</s>",
    "the <pad> cat <pad>",
    "<tool_call>cat</tool_call> the<tool_call>",
    "the<mask> cat <mask>the",
    "<|endoftext|>the<|endoftext|>",
    "the <unknown> <|",
    "THE Cat <B> the <b>",
]
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _train_byte_level(vocab_size: int, specials: list[str], split: str | None = None) -> Tokenizer:
    """Train byte-level BPE, as in GPT-2, Qwen and Llama 3."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        backend.pre_tokenizer = byte_level
    else:
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), byte_level]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _merges(directory: Path, specials: list[str]) -> int:
    """Write vocab.json and merges.txt; return the number of ids."""
    backend = _train_byte_level(310, specials)
    backend.model.save(str(directory))
    return backend.get_vocab_size()


def _write(directory: Path, **files: Any) -> None:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _described(content: str, **flags: bool) -> dict[str, Any]:
    """Return a token as configurations describe it."""
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": content} | dict.fromkeys(names, False) | flags


def _gpt2_added(directory: Path) -> None:
    """Fine-tune of 2023: tokens for chats in added_tokens.json, and which are special in the map."""
    size = _merges(directory, ["<|endoftext|>"])
    _write(
        directory,
        config={"model_type": "llama"},
        tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"},
        added_tokens={"<|im_end|>": size + 1, "<|im_start|>": size, "<tool_call>": size + 2},
        special_tokens_map={
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
    )


def _gpt2_prefix(directory: Path) -> None:
    """GPT-2's class by the model's type, with a space before each text, and no special token in a file."""
    _merges(directory, ["<|endoftext|>"])
    _write(directory, config={"model_type": "opt"}, tokenizer_config={"add_prefix_space": True})


def _opt(directory: Path) -> None:
    """OPT as published: every text begins with </s>."""
    _merges(directory, ["<s>", "<pad>", "</s>", "<unk>"])
    end = _described("</s>", normalized=True) | {"__type": "AddedToken"}
    _write(
        directory,
        config={"model_type": "opt"},
        tokenizer_config={
            "tokenizer_class": "GPT2Tokenizer",
            "add_bos_token": True,
            "bos_token": end,
            "eos_token": end,
            "unk_token": end,
            "pad_token": "<pad>",
        },
        special_tokens_map={
            "bos_token": "</s>",
            "eos_token": "</s>",
            "unk_token": "</s>",
            "pad_token": "<pad>",
        },
    )


def _qwen2_decoder(directory: Path) -> None:
    """Qwen2's slow tokenizer as transformers 4.40 saves it."""
    size = _merges(directory, [])
    tokens = [
        _described("<|endoftext|>", special=True),
        _described("<|im_start|>", special=True),
        _described("<|im_end|>", special=True),
        _described("<tool_call>"),
        _described("<mask>", special=True, lstrip=True, rstrip=True),
    ]
    _write(
        directory,
        config={"model_type": "qwen2"},
        tokenizer_config={
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": {str(size + index): token for index, token in enumerate(tokens)},
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
        added_tokens={token["content"]: size + index for index, token in enumerate(tokens)},
        special_tokens_map={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


def _qwen3_bare(directory: Path) -> None:
    """Class by the model's type, added tokens without flags."""
    size = _merges(directory, [])
    _write(
        directory,
        config={"model_type": "qwen3"},
        added_tokens={"<|endoftext|>": size, "<|im_start|>": size + 1, "<|im_end|>": size + 2},
    )


def _llama3_beyond(directory: Path) -> None:
    """Llama 3 with tokens that tokenizer_config.json adds to those of tokenizer.json."""
    backend = _train_byte_level(320, ["<|endoftext|>", "</s>"], _SPLIT)
    backend.add_tokens([AddedToken("<b>", single_word=True, normalized=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(directory / "tokenizer.json"))
    size = backend.get_vocab_size()
    _write(
        directory,
        config={"model_type": "llama"},
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "</s>",
            "added_tokens_decoder": {
                "0": _described("<|endoftext|>", special=True),
                "1": _described("</s>", special=True, rstrip=True),
                str(size - 1): _described("<b>", single_word=True, normalized=True),
                str(size): _described("<|im_start|>", special=True),
                str(size + 1): _described("<|im_end|>", special=True),
                str(size + 2): _described("<tool_call>", normalized=True),
            },
            "pad_token": "<pad>",
        },
    )


def _llama2_pad(directory: Path) -> None:
    """Llama 2 with a token for padding that only added_tokens.json has."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdehinostw.,123\n\u4e2d", "th", "\u2581t", "\u2581th", "\u2581the", "\u2581a"]
    merges = [("t", "h"), ("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("\u2581", "a")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    size = backend.get_vocab_size()
    _write(
        directory,
        config={"model_type": "llama"},
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"},
        added_tokens={"<pad>": size, "<|im_end|>": size + 1},
        special_tokens_map={
            "bos_token": "<s>",
            "eos_token": _described("<|im_end|>"),
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
    )


def _unigram(directory: Path) -> None:
    """Unigram with byte fallback, and special tokens that only tokenizer_config.json marks."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>", "<mask>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    described = json.loads(backend.to_str())
    described["added_tokens"] = []
    (directory / "tokenizer.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    _write(
        directory,
        config={"model_type": "mistral"},
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "mask_token": _described("<mask>", lstrip=True) | {"__type": "AddedToken"},
            "image_token": "<tool_call>",
            "extra_special_tokens": ["<|im_start|>"],
        },
    )


KINDS: dict[str, Callable[[Path], None]] = {
    "gpt2_added": _gpt2_added,
    "gpt2_prefix": _gpt2_prefix,
    "opt": _opt,
    "qwen2_decoder": _qwen2_decoder,
    "qwen3_bare": _qwen3_bare,
    "llama3_beyond": _llama3_beyond,
    "llama2_pad": _llama2_pad,
    "unigram": _unigram,
}


def _cases(directory: Path, seed: int) -> dict[str, Any]:
    """Return what transformers makes of texts and of ids, and what it is made by."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rng = random.Random(seed)
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    some = [rng.choices(range(len(tokenizer)), k=rng.randint(1, 12)) for _ in range(20)]
    decoded = [
        {
            "ids": ids,
            "text": tokenizer.decode(ids, skip_special_tokens=True),
            "raw": tokenizer.decode(ids, skip_special_tokens=False),
        }
        for ids in [*(one["ids"] for one in texts), *some]
    ]
    return {
        "transformers": transformers.__version__,
        "num_ids": len(tokenizer),
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "texts": texts,
        "decoded": decoded,
    }


def main(argv: list[str]) -> None:
    del argv
    root = Path(FLAGS.output)
    for seed, (name, make) in enumerate(KINDS.items()):
        if FLAGS.kinds and name not in FLAGS.kinds:
            continue
        directory = root / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        make(directory)
        (directory / "cases.json").write_text(
            json.dumps(_cases(directory, seed), ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(f"{name}: {len(TEXTS)} texts")


if __name__ == "__main__":
    flags.DEFINE_string("output", "tests/text/golden", "Directory of all kinds.")
    flags.DEFINE_multi_string("kinds", [], "Names of kinds to make; default: all.")
    app.run(main)
