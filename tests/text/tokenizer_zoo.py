"""Small tokenizers of the kinds that checkpoints contain, built in code."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pensieve_jax.text import Tokenizer, byte_tokenizer

CORPUS = [
    "the cat sat on the mat, the dog did not.",
    "h\u00e9llo w\u00f6rld \u4e2d\u6587 \U0001f642 the end.",
] * 3


def byte_level_backend(specials=("<s>", "</s>")):
    """Return byte-level BPE as in GPT-2, OPT and Llama 3."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metaspace_backend(byte_fallback=True, bos_by_processor=True):
    """Return a sentencepiece-like BPE as in Llama 2: a leading space, unknown characters as <0x..> tokens."""
    pieces = ["<unk>", "<s>", "</s>"]
    if byte_fallback:
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", *"abcdehinostw.,\n\u4e2d", "th", "\u2581t", "\u2581th", "\u2581the", "\u2581a"]
    merges = [("t", "h"), ("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("\u2581", "a")]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=byte_fallback,
        fuse_unk=True,
    )
    backend = Backend(model)
    if byte_fallback:
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
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos_by_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return backend


def build(name):
    if name == "bytes":
        return byte_tokenizer()
    backend = {
        "byte_level": byte_level_backend,
        "byte_fallback": metaspace_backend,
        "metaspace": lambda: metaspace_backend(byte_fallback=False),
    }[name]()
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


NAMES = ("bytes", "byte_level", "byte_fallback", "metaspace")
ZOO = {name: build(name) for name in NAMES}
