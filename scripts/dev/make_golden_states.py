"""Make tests/models/recurrent/golden: small models of torch and transformers, with their outputs.

The script needs torch and transformers, which the project does not. Run it in a separate environment:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers absl-py
    /tmp/golden/bin/python scripts/dev/make_golden_states.py

lstm.npz and seq2seq.npz hold a state_dict ("weights.<name>"), inputs and outputs. mamba/ is a Hugging Face
directory plus outputs.npz. Everything is computed in float32, from the weights as saved.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from absl import app, flags

FLAGS = flags.FLAGS
VOCAB_SIZE, EMBEDDING_SIZE, HIDDEN_SIZE = 24, 12, 16
GO, EOS = 1, 2
MAX_STEPS = 20
NUM_NEW_TOKENS = 12


class Encoder(torch.nn.Module):
    """Embedding and one LSTM layer: the LSTM model, and the encoder of the Seq2Seq model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, EMBEDDING_SIZE)
        self.lstm = torch.nn.LSTM(EMBEDDING_SIZE, HIDDEN_SIZE, batch_first=True)

    def forward(self, token_ids: Any, state: Any = None) -> Any:
        """Map i64[1, T] to f32[1, T, HIDDEN_SIZE] and (h, c)."""
        return self.lstm(self.embedding(token_ids), state)


class Decoder(Encoder):
    """Embedding, one LSTM layer, and a projection to scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)


class Seq2Seq(torch.nn.Module):
    """Encoder and decoder without shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, source_ids: Any) -> list[int]:
        """Return the best token of each step, until EOS or MAX_STEPS."""
        _, state = self.encoder(source_ids)
        tokens = [GO]
        while len(tokens) <= MAX_STEPS and tokens[-1] != EOS:
            hidden, state = self.decoder(torch.tensor([[tokens[-1]]]), state)
            tokens.append(int(self.decoder.out(hidden[0, -1]).argmax()))
        return tokens[1:]


def fill(model: Any, seed: int, scale: float) -> Any:
    """Fill with seeded normal weights; norm scales get 1 + noise, A_log Mamba's initial values + noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                noise = torch.log(torch.arange(1, 1 + noise.shape[1]).float()) + 0.1 * noise
            elif "norm" in name or name.endswith(".D"):
                noise = 1 + 0.2 * noise
            else:
                noise = scale * noise
            parameter.copy_(noise.bfloat16().float())
    return model.eval()


def weights(model: Any) -> dict[str, np.ndarray]:
    """Return the state_dict as saved."""
    return {f"weights.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}


def sentences(seed: int, vocab_size: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Draw sentences of token ids, without GO and EOS."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length) for length in lengths]


def make_lstm(root: Path, seed: int) -> None:
    """Save the model, and the state after the last word of each sentence."""
    model, values = fill(Encoder(), seed, 0.4), {}
    for i, ids in enumerate(sentences(seed, VOCAB_SIZE, (1, 7, 30))):
        _, (h, c) = model(torch.as_tensor(ids)[None])
        values |= {f"token_ids.{i}": ids, f"h.{i}": h[0, 0].numpy(), f"c.{i}": c[0, 0].numpy()}
    np.savez_compressed(root / "lstm.npz", **weights(model), **values)


def make_seq2seq(root: Path, seed: int) -> None:
    """Save the model, and the tokens written for each sentence."""
    model, values = fill(Seq2Seq(), seed, 1.6), {}
    for i, ids in enumerate(sentences(seed, VOCAB_SIZE, (1, 2, 3, 5, 8, 13, 21, 34))):
        tokens = model(torch.as_tensor(ids)[None])
        values |= {f"source_ids.{i}": ids, f"tokens.{i}": np.array(tokens)}
    np.savez_compressed(root / "seq2seq.npz", **weights(model), **values)


def make_mamba(root: Path, seed: int) -> None:
    """Save the model's directory, and the logits of each prompt and its greedy continuation."""
    from transformers import MambaConfig, MambaForCausalLM

    options = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5}
    config = MambaConfig(**options, time_step_rank=4, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    model, values = fill(MambaForCausalLM(config), seed, 0.3), {}
    for i, prompt in enumerate(sentences(seed, 64, (1, 3, 8, 13))):
        ids = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            logits = model(torch.tensor([ids])).logits[0]
            ids.append(int(logits[-1].argmax()))
        values |= {
            f"prompt.{i}": prompt,
            f"tokens.{i}": np.array(ids[len(prompt) :]),
            f"logits.{i}": logits.numpy(),
        }
    directory = root / "mamba"
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    np.savez_compressed(directory / "outputs.npz", **values)
    for path in directory.iterdir():
        path.chmod(0o644)


@torch.no_grad()
def main(argv: list[str]) -> None:
    del argv
    root = Path(FLAGS.output)
    root.mkdir(parents=True, exist_ok=True)
    for make in (make_lstm, make_seq2seq, make_mamba):
        make(root, FLAGS.seed)


if __name__ == "__main__":
    flags.DEFINE_string("output", "tests/models/recurrent/golden", "Directory to write into.")
    flags.DEFINE_integer("seed", 20240501, "Seed of weights and inputs.")
    app.run(main)
