"""Construction of an engine that is ready to serve, from a model's name and a configuration.

Owns: the fingerprint that binds a history to a model, and the order of construction: every check that can
fail runs before minutes of loading and compiling.
Does not know: turns, or the meaning of a model's name (`model_source`).
Called by `LLM`, the server's engine process, and programs that need a runner alone.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from model_defs import (
    LayerKind,
    ModelConfig,
    make_mesh,
    model_fingerprint,
    num_layer_parameters,
    source_config,
    source_weights_dtype,
)
from model_defs.registry import resolve_dtype
from pensieve_jax.cache import AnalyticCostModel, CostModel
from pensieve_jax.cache.order.cost import CostSubject
from pensieve_jax.config import EngineConfig, checked_config
from pensieve_jax.core.clock import Clock
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.cost_choice import CostChoice, costs_before_loading, costs_of_runner
from pensieve_jax.decoding.device.weights import ProgressBar, load_weights, serving_dtype
from pensieve_jax.decoding.turn_spec import ModelLimits
from pensieve_jax.device.kernel_choices import attention_choice
from pensieve_jax.device.kv_storage import slot_bytes
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.page_budget import MIN_PAGES, PagesDoNotFitError
from pensieve_jax.device.sizing import (
    GPU_SHARE,
    DeviceMemory,
    Machine,
    check_memory_is_known,
    default_host_bytes,
    memory_in_words,
    sized,
    warn_of_short_context,
    with_fewer_pages,
)
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.loop import Observe, unobserved
from pensieve_jax.engine.runner import Runner
from pensieve_jax.history import history_fingerprint, open_store
from pensieve_jax.history.opening import check_location
from pensieve_jax.model_source import resolve_model, source_tokenizer, with_tokenizer_end
from pensieve_jax.runtime.compilation import keep_compilations_in
from pensieve_jax.runtime.device_memory import allow_device_memory, jax_share, memory_limit_bytes
from pensieve_jax.runtime.host_memory import allow_pinning, available_bytes, pinnable_bytes, total_bytes
from pensieve_jax.text import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled:
    """An engine and its parts.

    Attributes:
      config: the configuration with all device-dependent values resolved, and sizes in pages.
      model_name: the name that the caller gave.
      source: the directory or preset that the name stands for.
      fingerprint: fingerprint of model and tokenizer; the history must have the same.
    """

    engine: Engine
    runner: ModelRunner
    config: EngineConfig
    costs: CostChoice
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    model_name: str
    source: str
    fingerprint: str


def assemble(
    model: str | Path,
    *,
    dtype: str,
    history: str | Path | None,
    synchronous: Literal["normal", "full"],
    config: EngineConfig | None,
    progress: bool,
    may_make_history: bool = True,
    clock: Clock | None = None,
    observe: Observe = unobserved,
    wrap: Callable[[ModelRunner], Runner] | None = None,
) -> Assembled:
    """Build an engine with all of its parts; see `LLM` for the arguments and errors.

    Without `may_make_history`, a missing history raises HistoryMissingError. The engine runs its steps on
    what `wrap` returns for the runner.
    """
    config = checked_config(config)
    check_location(history)
    source = resolve_model(model)
    model_config = source_config(source, config.runner.max_position_embeddings)
    config = config.with_weights_dtype(source_weights_dtype(source, config.runner.weights_dtype))
    config.resolve_context_tokens(model_config.max_position_embeddings)  # raises before loading starts
    allow_device_memory()  # before JAX is used, as the next line
    allow_pinning(_host_bytes(model_config, config, dtype), available_bytes())
    check_memory_is_known(config, _machine(mesh_of(config)))  # both raise before a history is created
    costs = _costs_before_loading(model_config, config, dtype)
    tokenizer = source_tokenizer(source, model_config.vocab_size)
    model_config = with_tokenizer_end(model_config, tokenizer)
    fingerprint = history_fingerprint(
        {"model": _fingerprint(model_config, source, config)},
        None if tokenizer is None else tokenizer.fingerprint,
    )
    with contextlib.ExitStack() as undo:
        store = open_store(
            history, fingerprint=fingerprint, synchronous=synchronous, may_make=may_make_history
        )
        undo.callback(store.close)
        runner, config = make_runner(source, dtype, config, progress)
        if costs is None:
            costs = _costs_of_runner(runner, model_config, config, dtype, str(model), progress)
        _log_costs(costs, config)
        engine = Engine(
            runner if wrap is None else wrap(runner),
            config,
            _limits(model_config, config),
            store,
            tokenizer=tokenizer,
            cost_model=costs.model,
            clock=clock,
            observe=observe,
        )
        undo.pop_all()
    return Assembled(engine, runner, config, costs, model_config, tokenizer, str(model), source, fingerprint)


def _fingerprint(model: ModelConfig, source: str, config: EngineConfig) -> str:
    runner = config.runner
    return model_fingerprint(model, source, seed=runner.random_seed, weights_dtype=runner.weights_dtype)


def make_runner(
    source: str, dtype: str, config: EngineConfig, progress: bool
) -> tuple[ModelRunner, EngineConfig]:
    """Load the weights, allocate memory and compile every bucket; returns the config of `Assembled`.

    A direct call keeps jaxlib's default limits of device and pinned memory; only `assemble` raises them.
    """
    if config.runner.compilation_cache_dir is not None:
        keep_compilations_in(config.runner.compilation_cache_dir)
    mesh = mesh_of(config)
    device = mesh.devices.flat[0]
    check_memory_is_known(config, _machine(mesh))
    model = load_weights(
        source,
        dtype,
        mesh,
        seed=config.runner.random_seed,
        max_position_embeddings=config.runner.max_position_embeddings,
        progress=progress,
        weights_dtype=config.runner.weights_dtype,
    )
    model_config = model.config
    config = config.with_weights_dtype(model.weights_dtype)
    asked, given, machine = config, config.cache, _machine(mesh)
    attention = attention_choice(model_config, config, model.compute_dtype, device, mesh.devices.size)
    config = sized(config, machine, model_config, model.compute_dtype, attention.name)
    config = config.with_num_buckets(on_gpu=device.platform == "gpu")
    if given.gpu_pages is None and not machine.is_cpu:  # so that errors name the share
        given = replace(given, gpu_memory_fraction=given.gpu_memory_fraction or GPU_SHARE)
    while True:
        runner = ModelRunner(model, config, mesh, given=given)
        try:
            _warm_up(runner, config, progress)
            break
        except PagesDoNotFitError as error:
            # A step takes more than `sizing` expects. Every pass has fewer pages.
            if given.gpu_pages is not None or error.most < MIN_PAGES:
                raise
            runner.device_pools.clear()
            config = with_fewer_pages(
                config, error.most, model_config, asked=asked, num_devices=mesh.devices.size
            )
    warn_of_short_context(config, model_config, _log)
    return runner, config


def _warm_up(runner: ModelRunner, config: EngineConfig, progress: bool) -> None:
    """Tell what the KV cache takes, and compile every bucket."""
    sizes = ", ".join(str(size) for size in sorted(runner.layouts))
    for line in (
        memory_in_words(config, runner.storage),
        f"{len(runner.layouts)} buckets to compile: steps of up to {sizes} tokens",
    ):
        _log.info(line)
        if progress:
            tqdm.write(line, file=sys.stderr)
    with ProgressBar("compiling", progress) as bar:
        runner.warm_up(bar)


def mesh_of(config: EngineConfig) -> Mesh:
    """Return the mesh of devices that share the model; raises ConfigError for too few devices."""
    size, num_devices = config.runner.tensor_parallel_size, len(jax.devices())
    if size > num_devices:
        limit = f"at most {num_devices}, the number of devices here"
        raise ConfigError("runner.tensor_parallel_size", size, limit)
    return make_mesh(size)


def _machine(mesh: Mesh) -> Machine:
    """Read the memory of the devices and of the host. Once the weights are loaded, what they take counts."""
    devices = list(mesh.devices.flat)
    share = jax_share()
    return Machine(
        is_cpu=devices[0].platform == "cpu",
        devices=tuple(
            DeviceMemory(
                device.device_kind,
                memory_limit_bytes(device),
                share,
                (device.memory_stats() or {}).get("bytes_in_use", 0),
            )
            for device in devices
        ),
        host_bytes=total_bytes(),
        free_bytes=available_bytes(),
        pinnable_bytes=pinnable_bytes(),
    )


def _host_bytes(model: ModelConfig, config: EngineConfig, dtype: str) -> int:
    """Return the most bytes that the host tier and chunks in transit take on GPUs, without using a device."""
    cache = config.cache
    slot = slot_bytes(model, cache, resolve_dtype(dtype, model))
    staged = config.runner.max_num_staged_pages * slot
    if not cache.has_given_host_tier or cache.cpu_memory_fraction is not None:
        return default_host_bytes(config, available_bytes(), config.runner.tensor_parallel_size)
    return staged + (cache.num_cpu_pages * slot if cache.cpu_bytes is None else cache.cpu_bytes)


def _limits(model: ModelConfig, config: EngineConfig) -> ModelLimits:
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_context_tokens=config.resolve_context_tokens(model.max_position_embeddings),
        eos_token_ids=model.eos_token_ids,
        max_logprobs=config.runner.max_logprobs,
        max_banned_ids=config.runner.max_banned_ids,
        penalties=config.runner.penalties,
    )


def cost_subject(
    model: ModelConfig,
    *,
    dtype: str,
    tensor_parallel_size: int,
    chunk_tokens: int,
    kv_dtype: str | None = None,
    weights_dtype: str | None = None,
) -> CostSubject:
    """Return the subject of cost profiles for this model and configuration on this machine."""
    compute_dtype = resolve_dtype(serving_dtype(dtype), model).name
    return CostSubject(
        architecture=model.architecture,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        dtype=compute_dtype,
        kv_dtype=kv_dtype or compute_dtype,
        device=jax.devices()[0].device_kind,
        tensor_parallel_size=tensor_parallel_size,
        chunk_tokens=chunk_tokens,
        layers=_layers_by_cost(model),
        weights_dtype=weights_dtype,
    )


def _layers_by_cost(model: ModelConfig) -> str:
    """Return `CostSubject.layers`. Kinds that cost the same, such as other rotations, are not told apart."""
    found, experts = model.experts, ""
    if found is not None:
        experts = f" moe {found.num_chosen} of {found.num_experts} x {found.width}"
    names = Counter(
        ("full" if kind.window is None else f"window {kind.window}") + experts * (kind.mlp == "moe")
        for kind in model.layer_kinds or (LayerKind(),)
    )
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


def _subject(model: ModelConfig, config: EngineConfig, dtype: str) -> CostSubject:
    return cost_subject(
        model,
        dtype=dtype,
        tensor_parallel_size=config.runner.tensor_parallel_size,
        chunk_tokens=config.cache.chunk_tokens,
        kv_dtype=config.cache.kv_dtype,
        weights_dtype=config.runner.weights_dtype,
    )


def costs_of_parts(parts: Assembled, config: EngineConfig, dtype: str, progress: bool) -> CostChoice:
    """Choose costs for another engine on the runner of `parts`; its policy and `stateful` may differ.

    A measurement empties the pools, so no engine may be running.

    Raises:
      ConfigError: `cache.cost_profile` names an invalid profile, or one of another subject.
      StepFailedError: a step failed, and the runner could not be reset.
    """
    model, runner = parts.model_config, parts.runner
    config = config.with_weights_dtype(parts.config.runner.weights_dtype)
    costs = _costs_before_loading(model, config, dtype)
    return costs or _costs_of_runner(runner, model, config, dtype, parts.model_name, progress)


def _costs_before_loading(model: ModelConfig, config: EngineConfig, dtype: str) -> CostChoice | None:
    """Choose costs without a runner if possible; raises ConfigError for a profile of another subject."""
    return costs_before_loading(
        config,
        _subject(model, config, dtype),
        estimated_cost_model(model, config.cache.chunk_tokens),
        is_accelerator=_is_accelerator(),
    )


def _is_accelerator() -> bool:
    return jax.default_backend() != "cpu"


def _costs_of_runner(
    runner: ModelRunner, model: ModelConfig, config: EngineConfig, dtype: str, name: str, progress: bool
) -> CostChoice:
    """Load or measure costs of recomputing with the warm runner; see `cost_choice`."""
    with ProgressBar("measuring costs", progress) as bar:
        return costs_of_runner(
            runner,
            config,
            _subject(model, config, dtype),
            estimated_cost_model(model, config.cache.chunk_tokens),
            name=name,
            context_tokens=config.resolve_context_tokens(model.max_position_embeddings),
            progress=bar,
        )


def _log_costs(costs: CostChoice, config: EngineConfig) -> None:
    ratio, source = costs.ratio_at_4096(config.cache.chunk_tokens), costs.source or "no file"
    _log.info(
        "eviction costs: %s (%s; %s); the chunk at 4,096 tokens costs %.2f times the first",
        costs.kind,
        source,
        costs.reason,
        ratio,
    )


def estimated_cost_model(model: ModelConfig, chunk_tokens: int) -> CostModel:
    """Return the analytic cost model, from the layers' weights and heads."""
    num_layers = Counter(kind.window for kind in model.kinds)
    width = model.num_heads * model.head_dim
    return AnalyticCostModel(
        chunk_tokens,
        num_weights=num_layer_parameters(model),
        attention_width=num_layers[None] * width,
        windows=tuple((window, num_layers[window] * width) for window in model.windows if window is not None),
    )
