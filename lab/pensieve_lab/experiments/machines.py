"""The simulated machines: one GPU with a measured profile, or several that serve a larger model.

Owns: the devices and models, their memory for the KV cache, and the arithmetic that derives a profile of
several GPUs, or of another kind of GPU, from that of one GPU.
Does not know: workloads or systems.
Called by the experiments and programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

from model_defs import ModelConfig, kv_bytes_per_token, num_parameters, preset
from pensieve_lab.simulator import DeviceProfile, profile_names

DEVICES = ("a100", "h200")
MEMORY_BYTES = (40_000_000_000, 220_000_000_000)
"""Memory for the KV cache on device and host, per GPU. The values of the paper's section 6.1, for any
device."""

_NUM_DEVICES = {"opt-66b": 4, "llama2-70b": 4}  # the paper's Table 1; other models use one
_SMALLER_MODEL = {"opt-66b": "opt-13b", "llama2-70b": "llama2-13b-gqa10"}


@dataclasses.dataclass(frozen=True)
class _Interconnect:
    """Cost of the all-reduces of a tensor-parallel layer; assumed, not measured.

    Attributes:
      bytes_per_s: bandwidth of one GPU's link, one way.
      latency_s: of a small all-reduce, by the number of GPUs; profiles are named after these.
      what: description.
    """

    bytes_per_s: float
    latency_s: Mapping[int, float]
    what: str


_NVLINK = _Interconnect(350e9, {2: 5e-6, 4: 10e-6}, "NVLink 4, 350 GB/s one way")
_INTERCONNECTS = {
    "a100": _Interconnect(20e9, {2: 20e-6, 4: 20e-6}, "PCIe 4 between pairs of GPUs, 20 GB/s one way"),
    "h200": _NVLINK,
    "h100": _NVLINK,
}
# An H100 computes like an H200, but reads its memory at 3.17 TB/s instead of 4.61 (ceilings of
# lab/results/h100_steps_llama2-13b-gqa10.json and h200_steps_llama2-13b-gqa10.json).
_SLOWER_MEMORY = {"h100": ("h200", 4.61 / 3.17)}


def num_devices(model: str) -> int:
    """Return the number of GPUs that serve a model together."""
    return _NUM_DEVICES.get(model, 1)


def profile_name(device: str, model: str, count: int | None = None) -> str:
    """Return the profile's name for reports; `x4` marks a derived one. `count` is the paper's by default."""
    count = count or num_devices(model)
    return f"{device}{f'x{count}' if count > 1 else ''}_{model}"


@lru_cache(maxsize=8)
def load_profile(device: str, model: str, count: int | None = None) -> DeviceProfile:
    """Return a profile that comes with the simulator, or one derived from the same family's on one GPU.

    Args:
      device: one of `DEVICES`, or one with slower memory.
      model: a preset.
      count: GPUs that share a larger model; the paper's by default.
    """
    if f"{device}_{model}" in profile_names():
        return DeviceProfile.load(f"{device}_{model}")
    if model in _SMALLER_MODEL:
        base = load_profile(device, _SMALLER_MODEL[model])
        return _of_several(base, model, count or num_devices(model), _INTERCONNECTS[device])
    like, times = _SLOWER_MEMORY[device]
    return _with_slower_memory(load_profile(like, model), like, device, times)


def derived_names() -> list[str]:
    """Return the names of profiles that `find_profile` derives: several GPUs, and GPUs with slower memory."""
    several = [
        profile_name(device, model, count)
        for device, link in _INTERCONNECTS.items()
        for count in link.latency_s
        for model in _SMALLER_MODEL
    ]
    slower = [profile_name(device, model) for device in _SLOWER_MEMORY for model in _SMALLER_MODEL.values()]
    return [*several, *slower]


def profile_help() -> str:
    """Return the help of a flag whose value `find_profile` takes."""
    names, derived = ", ".join(profile_names()), ", ".join(derived_names())
    made = f"several GPUs or slower memory, derived from those: {derived}"
    return f"A file, or one of {names}; {made}."


def find_profile(name: str) -> DeviceProfile:
    """Return a derived profile, or what `DeviceProfile.load` returns for `name`; raises its ConfigError."""
    if name not in derived_names():
        return DeviceProfile.load(name)
    devices, _, model = name.partition("_")
    device, _, count = devices.partition("x")
    return load_profile(device, model, int(count) if count else None)


def memory_bytes(model: str) -> tuple[int, int]:
    """Return device and host memory for the KV cache, of all GPUs together."""
    gpu_bytes, cpu_bytes = MEMORY_BYTES
    count = num_devices(model)
    return count * gpu_bytes, count * cpu_bytes


def _with_slower_memory(base: DeviceProfile, like: str, device: str, times: float) -> DeviceProfile:
    """Return the profile of a device like `like`, with memory reads that take `times` as long."""
    costs = base.step
    return dataclasses.replace(
        base,
        device=base.device.replace(like.upper(), device.upper()),
        source="derived",
        provenance={
            "base": f"the profile of {base.model} on {base.device}, which is {base.source}",
            "reading": f"as {base.device}, but reading memory takes x {times:.2f} of its time",
        },
        step=dataclasses.replace(
            costs, weight_read_s=costs.weight_read_s * times, kv_read_s=costs.kv_read_s * times
        ),
        page_copy_byte_s=base.page_copy_byte_s * times,
        figures=(),
        fitted_runs=(),
    )


def _of_several(base: DeviceProfile, model: str, count: int, link: _Interconnect) -> DeviceProfile:
    """Return the profile of `count` GPUs with tensor parallelism; only norms are not split.

    Reading weights and matrix products scale with parameters, reading the KV cache with its bytes, and
    attention with layers times heads, each divided by `count`. The rest scales with layers or with layers
    times width, undivided. Two all-reduces per layer are added.
    """
    small, large = preset(base.model), preset(model)
    weights = num_parameters(large) / num_parameters(small) / count
    state = _kv_bytes(large) / _kv_bytes(small) / count
    heads = (large.num_layers * large.num_heads) / (small.num_layers * small.num_heads) / count
    layers = large.num_layers / small.num_layers
    width = layers * large.hidden_size / small.hidden_size
    num_reductions = 2 * large.num_layers
    reduced_bytes = 2 * large.hidden_size  # of a token, in 16 bits
    latency_s = link.latency_s[count]
    reduction_s = reduced_bytes * 2 * (count - 1) / count / link.bytes_per_s
    costs = base.step
    earlier = f"{base.provenance['reading']}; then " if "reading" in base.provenance else ""
    return dataclasses.replace(
        base,
        model=model,
        device=f"{count} x {base.device}",
        source="derived",
        provenance={
            "base": f"the profile of {base.model} on one {base.device}, which is {base.source}",
            "derivation": f"{earlier}by counts, for {count} GPUs: weights x {weights:.3f} each, KV state x "
            f"{state:.3f}, attention x {heads:.3f}, layers x {layers:.3f}. Nothing of it was measured",
            "interconnect": f"assumed: {link.what}, {1e6 * latency_s:.0f} us an all-reduce, two a layer",
        },
        kv_token_bytes=_kv_bytes(large),
        step=dataclasses.replace(
            costs,
            weight_read_s=costs.weight_read_s * weights,
            token_s=costs.token_s * weights,
            kv_read_s=costs.kv_read_s * state,
            pair_s=costs.pair_s * heads,
            span_s=costs.span_s * layers,
            step_s=costs.step_s * layers + num_reductions * latency_s,
            padded_token_s=costs.padded_token_s * width + num_reductions * reduction_s,
        ),
        to_device=dataclasses.replace(base.to_device, bytes_per_s=base.to_device.bytes_per_s * count),
        to_host=dataclasses.replace(base.to_host, bytes_per_s=base.to_host.bytes_per_s * count),
        figures=(),
        fitted_runs=(),
        num_devices=count,
    )


def _kv_bytes(model: ModelConfig) -> int:
    return kv_bytes_per_token(model, dtype="bfloat16")
