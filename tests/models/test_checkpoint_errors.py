"""Every kind of damaged checkpoint is a CheckpointError that names the tensor; harmless oddities load."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_defs import (
    CheckpointError,
    UnsupportedModelError,
    hf_weights,
    load_model,
    make_mesh,
    model_fingerprint,
)
from model_defs.hf_config import load_config
from model_defs.parameters import named_parameters
from tests.models.helpers import GOLDEN, dense_logits, golden

Tensors = dict[str, np.ndarray]
NORM = "model.layers.1.input_layernorm.weight"


def load(directory: Path) -> None:
    load_model(directory, dtype="float32", mesh=make_mesh(1))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return a single-file float16 checkpoint that may be damaged."""
    return Path(shutil.copytree(GOLDEN / "llama_default", tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return a checkpoint in several files with an index."""
    return Path(shutil.copytree(GOLDEN / "llama_gqa_linear", tmp_path / "model"))


def tensors_of(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def rewrite(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors")


def assert_golden(directory: Path, variant: str) -> None:
    token_ids, expected = golden(variant)
    model = load_model(directory, dtype="float32", mesh=make_mesh(1))
    np.testing.assert_allclose(dense_logits(model, token_ids), expected, atol=1e-4, rtol=0)


def test_missing_tensor(llama: Path) -> None:
    tensors = tensors_of(llama)
    del tensors[NORM], tensors["lm_head.weight"]
    rewrite(llama, tensors)
    with pytest.raises(CheckpointError, match=rf"2 tensor\(s\) are missing: 'lm_head.weight', '{NORM}'"):
        load(llama)


def test_extra_tensor(llama: Path) -> None:
    rewrite(llama, tensors_of(llama) | {"model.layers.7.mlp.up_proj.weight": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) are not part .*'model.layers.7.mlp.up_proj"):
        load(llama)


def test_misshapen_tensor_names_both_shapes(llama: Path) -> None:
    tensors = tensors_of(llama)
    tensors[NORM] = np.zeros(25, np.float16)
    rewrite(llama, tensors)
    with pytest.raises(CheckpointError, match=rf"'{NORM}' .* has shape \[25\], the config asks for \[24\]"):
        load(llama)


@pytest.mark.parametrize("twin", ["norm.weight", "decoder.norm.weight", "model.decoder.norm.weight"])
def test_two_tensors_for_one_place(llama: Path, twin: str) -> None:
    """Prefixes differ between exports, so it is unknown which of the two was meant."""
    rewrite(llama, tensors_of(llama) | {twin: np.zeros(24, np.float16)})
    with pytest.raises(
        CheckpointError, match=r"tensors '.*norm.weight' in .* and '.*norm.weight' in"
    ) as info:
        load(llama)
    assert repr(twin) in str(info.value) and "'model.norm.weight'" in str(info.value)


def test_integer_tensor(llama: Path) -> None:
    rewrite(llama, tensors_of(llama) | {NORM: np.zeros(24, np.int32)})
    filled: list[str] = []
    with pytest.raises(CheckpointError, match=rf"'{NORM}' .* dtype I32; one of F32, F16, BF16"):
        load_model(llama, mesh=make_mesh(1), progress=lambda done, total, name: filled.append(name))
    assert not filled  # the headers show it, so no parameter is read for nothing


@pytest.mark.parametrize("num_bytes_lost", [1, 3000])
def test_truncated_data(llama: Path, num_bytes_lost: int) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-num_bytes_lost])
    with pytest.raises(
        CheckpointError, match=r"tensor 'model\..*' \[.*\] is truncated: model.safetensors has"
    ):
        load(llama)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 100])
def test_truncated_header(llama: Path, num_bytes: int) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        load(llama)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json at all", "damaged safetensors header"),
        (b"[1, 2, 3]", "damaged safetensors header"),
        (b"[" * 100_000, "damaged safetensors header: RecursionError"),
        (b'{"a": {"dtype": "F32"}}', "damaged safetensors header: KeyError"),
        (
            b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
            r"\['x'\] is not a list of sizes",
        ),
        (b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}', r"\[-1, -1\] is not a list"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}', r"\[4\] is not a list of sizes"),
        (
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}',
            r"\[0, inf\] is not a list",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
            r"'a' F32\[3\] has 8 bytes of data in model.safetensors, 12 are needed",
        ),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 0]}}', "'a' .* is truncated"),
    ],
)
def test_damaged_header(llama: Path, header: bytes, message: str) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(llama)


def test_missing_file_of_an_index(sharded: Path) -> None:
    path = next(sharded.glob("model-00002-of-*.safetensors"))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"names the file '{path.name}', which is not in"):
        load(sharded)


def test_index_that_disagrees_with_its_files(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    where = index["weight_map"].pop(NORM)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"'{NORM}' is in {where}, but .* places it in None"):
        load(sharded)
    index["weight_map"] |= {NORM: where, "ghost": where}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor 'ghost' is missing"):
        load(sharded)
    for nothing in (3, None, ["model.safetensors"]):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | {NORM: nothing}}))
        with pytest.raises(CheckpointError, match=rf"places tensor '{NORM}' in .*, which is not a file name"):
            load(sharded)
    path.write_text(json.dumps({"weight_map": {NORM: "x" * 300}}))
    with pytest.raises(CheckpointError, match=r"'x+', which is not in"):
        load(sharded)
    path.write_text(json.dumps({"weight_map": {NORM: "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'\.\./model.safetensors', which is not in"):
        load(sharded)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load(sharded)


def test_torch_pickles_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        load(llama)
    (llama / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin: torch pickles"):
        load(llama)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor random:<preset>"):
        load(tmp_path / "nowhere")


def test_context_beyond_the_learned_table() -> None:
    with pytest.raises(UnsupportedModelError, match=r"max_position_embeddings=49 exceeds the .* table of 48"):
        load_model(GOLDEN / "opt_pre_norm", mesh=make_mesh(1), max_position_embeddings=49)
    longer = load_model(GOLDEN / "llama_default", mesh=make_mesh(1), max_position_embeddings=49)
    assert longer.config.max_position_embeddings == 49


ROTARY = [f"model.layers.0.self_attn.rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")]


@pytest.mark.parametrize("name", [*ROTARY, "model.rotary_emb.inv_freq"])
def test_tables_of_rotary_positions_are_skipped(llama: Path, name: str) -> None:
    """They follow from the config, and some exports have them in a dtype that is not supported."""
    rewrite(llama, tensors_of(llama) | {name: np.zeros(3, np.float64), f"layers.{name}": np.zeros(3)})
    assert_golden(llama, "llama_default")


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("is_in", ["shard", "index", "another shard"])
def test_tables_of_rotary_positions_need_not_agree_with_the_index(
    sharded: Path, name: str, is_in: str
) -> None:
    index_path, (shard, other) = sharded / "model.safetensors.index.json", sorted(sharded.glob("*-of-*"))[:2]
    index = json.loads(index_path.read_text())
    if is_in != "index":
        save_file(load_file(shard) | {name: np.zeros(3, np.float32)}, shard)
    if is_in != "shard":
        index["weight_map"][name] = other.name
        index_path.write_text(json.dumps(index))
    model_fingerprint(load_config(sharded), sharded)
    assert_golden(sharded, "llama_gqa_linear")


@pytest.mark.parametrize(
    ("name", "dtype", "says"),
    [
        ("mlp.down_proj.qweight", np.int32, r"'model.layers.0.mlp.down_proj.qweight' .*\(AWQ or GPTQ\)"),
        ("mlp.down_proj.g_idx", np.int32, r"\(GPTQ\)"),
        ("mlp.down_proj.weight_packed", np.int32, r"\(compressed-tensors\)"),
        ("mlp.down_proj.weight_scale_inv", np.float32, r"\(FP8\)"),
        ("mlp.down_proj.weight_scale", np.float32, r"\(FP8 or INT8\)"),
        ("mlp.down_proj.weight_scale_2", np.float32, r"\(ModelOpt NVFP4\)"),
        ("mlp.down_proj.SCB", np.float32, r"\(bitsandbytes INT8\)"),
        ("mlp.down_proj.weight.absmax", np.uint8, r"\(bitsandbytes 4-bit\)"),
        ("self_attn.k_scale", np.float32, r"\(a quantized KV cache\)"),
        ("self_attn.k_proj.k_scale", np.float32, r"\(a quantized KV cache\)"),
        ("mlp.down_proj.weight", np.int8, "has dtype I8, which shows quantized weights, but neither"),
    ],
)
def test_quantized_tensors_are_named_with_their_format(
    llama: Path, name: str, dtype: type, says: str
) -> None:
    """Without quantization_config they were called missing, extra or of a wrong dtype."""
    rewrite(llama, tensors_of(llama) | {f"model.layers.0.{name}": np.zeros(4, dtype)})
    with pytest.raises(CheckpointError, match=says):
        load(llama)


@pytest.mark.parametrize(
    ("files", "removed", "says"),
    [
        (["quant_config.json"], [], r"the weights are quantized \(AWQ\), but no tensor is; remove that"),
        (["hf_quant_config.json"], [], "quantized by ModelOpt"),
        (["adapter_config.json"], [], r"holds adapter_config.json: a LoRA adapter \(PEFT\) .* merge it"),
        (["adapter_config.json", "adapter_model.safetensors"], ["config.json", "model.safetensors"], "LoRA"),
        (["adapter_model.safetensors"], ["model.safetensors"], "adapter_model.safetensors: a LoRA adapter"),
        (
            ["llama-q4.gguf"],
            ["config.json", "model.safetensors"],
            "holds llama-q4.gguf: GGUF is not supported",
        ),
        (["llama-q4.gguf"], ["model.safetensors"], "GGUF is not supported"),
        (
            ["params.json", "consolidated.safetensors"],
            ["config.json"],
            "holds params.json .* of Mistral and M",
        ),
        (["consolidated.safetensors"], ["model.safetensors"], "Mistral's own format is not supported"),
        (["consolidated.00.pth"], ["model.safetensors"], "Meta's own format is not supported"),
        (["tf_model.h5"], ["model.safetensors"], "TensorFlow is not supported"),
        ([], ["config.json"], "no config.json in .*is this a model directory"),
    ],
)
def test_directories_of_other_formats_are_named(
    llama: Path, files: list[str], removed: list[str], says: str
) -> None:
    for name in files:
        (llama / name).write_text("{}")
    for name in removed:
        (llama / name).unlink()
    with pytest.raises(CheckpointError, match=says):
        load(llama)


def test_files_of_another_format_beside_a_whole_model_are_left_alone(llama: Path) -> None:
    """Mistral publishes both formats in one repository."""
    for name in ("params.json", "consolidated.safetensors", "model.gguf", "tekken.json"):
        (llama / name).write_text("{}")
    assert_golden(llama, "llama_default")


def test_a_copy_of_the_tied_head_loads(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "opt_pre_norm", tmp_path / "model"))
    tensors = tensors_of(directory)
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].copy()
    rewrite(directory, tensors)
    assert_golden(directory, "opt_pre_norm")


def test_a_tied_head_that_is_not_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would ignore it, but the author of the save meant it: it must not be dropped silently."""
    directory = Path(shutil.copytree(GOLDEN / "opt_pre_norm", tmp_path / "model"))
    tensors = tensors_of(directory)
    table = tensors["model.decoder.embed_tokens.weight"]
    names = "'lm_head.weight' and 'model.decoder.embed_tokens.weight' differ: .* tie_word_embeddings=true"
    last = table.copy()
    last[-1, -1] += 1
    rewrite(directory, tensors | {"lm_head.weight": last})
    with pytest.raises(CheckpointError, match=names):
        load(directory)
    rewrite(directory, tensors | {"lm_head.weight": table[:-1].copy()})
    with pytest.raises(CheckpointError, match=rf"'lm_head.weight' is BF16\[{len(table) - 1}, .*they must be"):
        load(directory)
    rewrite(directory, tensors | {"lm_head.weight": table.astype(np.float64)})
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is F64.*they must be the same"):
        load(directory)
    # so that the difference is not in the first block
    monkeypatch.setattr(hf_weights, "_COMPARED_BYTES", 1000)
    rewrite(directory, tensors | {"lm_head.weight": last})
    with pytest.raises(CheckpointError, match=names):
        load(directory)


@pytest.mark.parametrize("prefix", ["", "decoder."])
def test_opt_without_prefixes(tmp_path: Path, prefix: str) -> None:
    directory = Path(shutil.copytree(GOLDEN / "opt_post_norm", tmp_path / "model"))
    tensors = {key.replace("model.decoder.", prefix): value for key, value in tensors_of(directory).items()}
    assert all(key.startswith(prefix) for key in tensors)
    rewrite(directory, tensors)
    assert_golden(directory, "opt_post_norm")


def test_fingerprint_sees_other_weights_but_not_other_directories(llama: Path) -> None:
    config = load_config(llama)
    original = model_fingerprint(config, GOLDEN / "llama_default")
    assert original.startswith("llama-2x24-")
    assert model_fingerprint(config, llama) == original
    tensors = tensors_of(llama)
    tensors[NORM] = tensors[NORM] + np.float16(1)
    rewrite(llama, tensors)
    assert model_fingerprint(config, llama) != original


def test_the_fingerprint_is_of_the_beginning_of_every_tensor(llama: Path) -> None:
    """`weights_digest` promises this: a digest of more bytes must keep older histories readable."""
    config, tensors = load_config(llama), tensors_of(llama)
    rewrite(llama, tensors)  # this library's order of tensors, which counts as well
    original = model_fingerprint(config, llama)
    table = tensors["model.embed_tokens.weight"]
    assert table.itemsize == 2
    table.reshape(-1)[32:] += 1
    rewrite(llama, tensors)
    assert model_fingerprint(config, llama) == original
    table.reshape(-1)[31] += 1
    rewrite(llama, tensors)
    assert model_fingerprint(config, llama) != original


@pytest.mark.parametrize(
    ("variant", "tp"),
    [
        ("llama_default", 4),
        ("opt_pre_norm", 4),
        ("qwen2_untied", 2),
        ("qwen3_bias", 2),
        ("mistral_gqa", 2),
        ("phi3_long", 2),
        ("gpt2_tied", 2),
        ("gpt2_untied", 4),
        ("phi3_short", 4),
        ("olmo2_bias", 2),
        ("qwen3_moe_gqa", 2),
        ("mixtral_gqa", 2),
        ("glm4_bias", 2),
        ("cohere2_bias", 2),
        ("gemma3_ropes", 2),
    ],
)
def test_loads_onto_several_devices(variant: str, tp: int) -> None:
    """Tensors are split before they are fused; the values are those of one device."""
    models = [load_model(GOLDEN / variant, dtype="float32", mesh=make_mesh(size)) for size in (1, tp)]
    for (name, one), (_, several) in zip(*map(named_parameters, models), strict=True):
        assert several.get_value().sharding.mesh.shape == {"tp": tp}
        np.testing.assert_array_equal(one.get_value(), several.get_value(), err_msg=name)


def test_a_projection_that_has_a_bias_too_many(tmp_path: Path) -> None:
    """The family determines the biases, and the checkpoint must have exactly these."""
    directory = Path(shutil.copytree(GOLDEN / "qwen2_tied", tmp_path / "model"))
    tensors = tensors_of(directory)
    extra = "model.layers.0.self_attn.o_proj.bias"
    rewrite(directory, tensors | {extra: np.zeros(24, np.float32)})
    with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) are not part .*'{extra}'"):
        load(directory)
    missing = "model.layers.1.self_attn.k_proj.bias"
    rewrite(directory, {name: value for name, value in tensors.items() if name != missing})
    with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) are missing: '{missing}'"):
        load(directory)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_gpt2_with_masks_and_without_a_prefix_loads(tmp_path: Path, prefix: str) -> None:
    """So is the file of OpenAI's model. A mask in another family is superfluous."""
    directory = Path(shutil.copytree(GOLDEN / "gpt2_tied", tmp_path / "model"))
    tensors = {prefix + name.removeprefix("transformer."): x for name, x in tensors_of(directory).items()}
    masks = {"attn.bias": np.tril(np.ones((1, 1, 48, 48), np.float32)), "attn.masked_bias": np.float32(-1e4)}
    for layer in range(2):
        tensors |= {f"{prefix}h.{layer}.{name}": np.array(mask) for name, mask in masks.items()}
    rewrite(directory, tensors)
    assert_golden(directory, "gpt2_tied")
    rewrite(directory, tensors | {f"{prefix}h.2.attn.c_attn.bias": np.zeros(72, np.float32)})
    with pytest.raises(
        CheckpointError, match=rf"1 tensor\(s\) are not part .*'{prefix}h.2.attn.c_attn.bias'"
    ):
        load(directory)


def test_masks_are_part_of_gpt2_only(llama: Path) -> None:
    rewrite(llama, tensors_of(llama) | {"model.layers.0.attn.bias": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) are not part .*'model.layers.0.attn.bias'"):
        load(llama)


def test_a_gpt2_whose_tied_head_differs(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "gpt2_tied", tmp_path / "model"))
    tensors = tensors_of(directory)
    head = tensors["transformer.wte.weight"].copy()
    rewrite(directory, tensors | {"lm_head.weight": head})
    assert_golden(directory, "gpt2_tied")
    head[3] += 1
    rewrite(directory, tensors | {"lm_head.weight": head})
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' and 'transformer.wte.weight' differ"):
        load(directory)
