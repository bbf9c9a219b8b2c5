"""Multimodal checkpoints whose text half is a model of a family: its options and its tensors.

Owns the table of such architectures: where config.json has the options of the text half, the defaults of
missing ones, and which tensors belong to images. The text half computes what a plain model of its family
does: the three position ids of a text token are equal, so rotary positions in sections equal plain ones.
Knows families by name only.
"""

import dataclasses
from pathlib import Path
from typing import Any

from model_defs.config import read_json
from model_defs.errors import UnsupportedModelError
from model_defs.safetensors_reader import TensorEntry

_SHARED = ("bos_token_id", "eos_token_id")
_OUTER = ("tie_word_embeddings", "dtype", "torch_dtype")


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """Multimodal architecture.

    Attributes:
      name: `model_type` in config.json.
      hf_architecture: name in `architectures`.
      family: `model_type` of a plain model of the text half's family.
      text_type: `model_type` in `text_config`.
      left_out: beginnings of the names of tensors that belong to images, behind an optional "model.".
      defaults: defaults of transformers for missing options of the text half that differ from the family's.
      may_be_flat: whether older files have the text half's options beside `vision_config`.
      others: `model_type` of plain models by that of other text halves.
      has_sections: whether rotary positions are in sections, which are equal for text.
    """

    name: str
    hf_architecture: str
    family: str
    text_type: str
    left_out: tuple[str, ...]
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    may_be_flat: bool = False
    others: dict[str, str] = dataclasses.field(default_factory=dict)
    has_sections: bool = False


_QWEN2_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# Published files leave out what equals them.
_LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}

MULTIMODAL: dict[str, Multimodal] = {
    row.hf_architecture: row
    for row in (
        *(
            Multimodal(
                name=name,
                hf_architecture=hf_architecture,
                family="qwen2",
                text_type=f"{name}_text",
                left_out=("visual.",),
                defaults=_QWEN2_DEFAULTS,
                may_be_flat=True,
                has_sections=True,
            )
            for name, hf_architecture in (
                ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
                ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
            )
        ),
        Multimodal(
            name="qwen3_vl",
            hf_architecture="Qwen3VLForConditionalGeneration",
            family="qwen3",
            text_type="qwen3_vl_text",
            left_out=("visual.",),
            defaults={"rope_theta": 5e5, "max_position_embeddings": 128000},
            has_sections=True,
        ),
        Multimodal(
            name="mistral3",
            hf_architecture="Mistral3ForConditionalGeneration",
            family="mistral",
            text_type="mistral",
            left_out=("vision_tower.", "multi_modal_projector."),
            others={"ministral3": "ministral3"},
        ),
        Multimodal(
            name="internvl",
            hf_architecture="InternVLForConditionalGeneration",
            family="qwen2",
            text_type="qwen2",
            left_out=("vision_tower.", "multi_modal_projector."),
            others={"qwen3": "qwen3"},
        ),
        *(
            Multimodal(
                name=name,
                hf_architecture=hf_architecture,
                family="llama",
                text_type="llama",
                left_out=left_out,
                defaults=_LLAMA_DEFAULTS,
            )
            for name, hf_architecture, left_out in (
                ("llava", "LlavaForConditionalGeneration", ("vision_tower.", "multi_modal_projector.")),
                ("idefics3", "Idefics3ForConditionalGeneration", ("vision_model.", "connector.")),
                ("smolvlm", "SmolVLMForConditionalGeneration", ("vision_model.", "connector.")),
            )
        ),
        Multimodal(
            name="gemma3",
            hf_architecture="Gemma3ForConditionalGeneration",
            family="gemma3_text",
            text_type="gemma3_text",
            left_out=("vision_tower.", "multi_modal_projector."),
        ),
    )
}
"""All multimodal architectures, by `architectures`."""


def text_half(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the text half of a multimodal model; values of another model as they are.

    Raises UnsupportedModelError for a text half of another kind.
    """
    row = _row(values)
    if row is None:
        return values
    text = values.get("text_config")
    is_flat = text is None and row.may_be_flat
    text = values if is_flat else text
    if not isinstance(text, dict):
        raise UnsupportedModelError(f"config.json: text_config={text!r} must be an object")
    found = None if is_flat else text.get("model_type")
    found = row.text_type if found is None else found
    families = {row.text_type: row.family} | row.others
    if not isinstance(found, str) or found not in families:
        raise UnsupportedModelError(
            f"config.json: text_config has model_type={found!r}, which is not supported in "
            f"{row.hf_architecture}; one of {', '.join(map(repr, families))} is"
        )
    outer = {name: values[name] for name in _OUTER if values.get(name) is not None}
    if outer.keys() & {"dtype", "torch_dtype"}:
        text = {name: value for name, value in text.items() if name not in ("dtype", "torch_dtype")}
    shared = {name: values[name] for name in _SHARED if name in values and text.get(name) is None}
    half = row.defaults | text | shared | outer
    if row.has_sections:
        half |= {name: _unsectioned(half.get(name)) for name in ("rope_scaling", "rope_parameters")}
    return half | {"architectures": None, "model_type": families[found]}


def text_tensors(entries: dict[str, TensorEntry], directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of `directory` without those that belong to images, if its model is multimodal."""
    row = _row(read_json(directory / "config.json"))
    if row is None:
        return entries
    return {
        name: entry
        for name, entry in entries.items()
        if not name.removeprefix("model.").startswith(row.left_out)
    }


def _row(values: dict[str, Any]) -> Multimodal | None:
    """Return the row of `architectures`, or of `model_type` if that is missing; None for another model."""
    names, model_type = values.get("architectures"), values.get("model_type")
    names = [] if names is None else names
    if not isinstance(names, list):
        return None
    for row in MULTIMODAL.values():
        if row.hf_architecture in names and len(names) == 1 and model_type in (None, row.name):
            return row
        if not names and model_type == row.name:
            return row
    return None


def _unsectioned(rope: Any) -> Any:
    """Return a rope section without the division of its frequencies among three position ids."""
    if not isinstance(rope, dict):
        return rope
    rest = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {name: "default" if value == "mrope" else value for name, value in rest.items()}
