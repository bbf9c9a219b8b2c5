"""Reader and writer of the options that say which layers of a model have a window.

Owns `layer_types`, and the pattern that replaces a missing one: in each period of layers, all but the last
have the window. What else differs between the two types, such as rotary positions, is the family's.
"""

from typing import Any, Literal

from model_defs.config import LayerKind, ModelConfig
from model_defs.errors import UnsupportedModelError
from model_defs.hf_options import integer

_SLIDING, _FULL = "sliding_attention", "full_attention"


def layer_windows(values: dict[str, Any], *, period: int, window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, or None if it sees all tokens.

    Without `layer_types`, every layer has the window but the last of each `period`. `window` is the default
    of `sliding_window`. Raises UnsupportedModelError for another type, or for layers with a window if
    `sliding_window` is null.
    """
    num_layers = integer(values, "num_hidden_layers")
    types = values.get("layer_types")
    if types is None:
        types = [_SLIDING if (index + 1) % period else _FULL for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise UnsupportedModelError(
            f"config.json: layer_types={types!r:.80} must be a list of num_hidden_layers={num_layers} entries"
        )
    for found in types:
        if found not in (_SLIDING, _FULL):
            raise UnsupportedModelError(
                f"layer_types: {found!r} is not supported; {_SLIDING} and {_FULL} are"
            )
    if _SLIDING not in types:
        return (None,) * num_layers
    size = integer(values | {"sliding_window": values.get("sliding_window", window)}, "sliding_window")
    return tuple(size if found == _SLIDING else None for found in types)


def written_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the options that `layer_windows` reads."""
    windows = [kind.window for kind in config.layer_kinds] or [None] * config.num_layers
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
    }


def kinds_of_one_window(
    values: dict[str, Any], default: int | None = None, mlp: Literal["dense", "moe"] = "dense"
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers that all have `sliding_window`, or no window if it is null.

    `default` is the window where the option is missing.
    """
    window = None
    if values.get("sliding_window", default) is not None:
        window = integer(values, "sliding_window", default)
    return (LayerKind(window=window, mlp=mlp),) * integer(values, "num_hidden_layers")


def written_one_window(config: ModelConfig) -> dict[str, Any]:
    """Return the option that `kinds_of_one_window` reads."""
    return {"sliding_window": config.layer_kinds[0].window if config.layer_kinds else None}
