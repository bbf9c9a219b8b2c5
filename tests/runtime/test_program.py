"""Keys of programs: every input of the lowering changes them, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs import load_model, make_mesh
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.runtime.program import Program, ProgramKeys


@jax.jit
def add(x, y):
    return x + y


@jax.jit
def subtract(x, y):
    return x - y


REPLICATED = PartitionSpec()


class Pair(NamedTuple):
    a: object
    b: object


class Other(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass(frozen=True)
class StaticArguments:
    value: object


def key(*arguments, function=add, **statics):
    return ProgramKeys().key(Program(function, arguments, statics))


def array(shape=(4,), dtype="float32", devices=(0,), spec=REPLICATED):
    mesh = Mesh([jax.devices("cpu")[i] for i in devices], ("tp",))  # several, also beside one GPU
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def of(value):
    return key(array(), statics=StaticArguments(value))


DIFFERENT = {
    "function": (key(array()), key(array(), function=subtract)),
    "shape": (key(array()), key(array((5,)))),
    "dtype": (key(array()), key(array(dtype="bfloat16"))),
    "weak type": (key(jnp.add(1, 1)), key(jnp.asarray(2, np.int32))),
    "committed": (key(jnp.ones(4)), key(jax.device_put(jnp.ones(4), jax.devices()[0]))),
    "no sharding": (key(array()), key(jax.ShapeDtypeStruct((4,), "float32"))),
    "devices": (key(array(devices=(0, 1))), key(array(devices=(1, 0)))),
    "split": (key(array(devices=(0, 1))), key(array(devices=(0, 1), spec=PartitionSpec("tp")))),
    "order": (key(array(), array((5,))), key(array((5,)), array())),
    "nesting": (key([array(), array()]), key([array()], [array()])),
    "names in a dict": (key({"a": array()}), key({"b": array()})),
    "names of a class": (key(Pair(array(), array())), key(Other(array(), array()))),
    "name of a static": (key(array(), mode=1), key(array(), form=1)),
    "number": (of(1), of(2)),
    "number's type": (of(1), of(1.0)),
    "bool": (of(1), of(True)),
    "close floats": (of(0.1), of(np.nextafter(0.1, 1).item())),
    "text": (of("1"), of(1)),
    "layers": (of(range(2)), of(range(1, 2))),
    "set": (of(frozenset({"a"})), of(frozenset({"a", "b"}))),
    "long array": (of(np.zeros(5000)), of(np.eye(1, 5000, 2500)[0])),
    "words that run together": (of(["a", "bc"]), of(["ab", "c"])),
    "treedef": (of(jax.tree.structure({"a": 1})), of(jax.tree.structure({"b": 1}))),
    "function in statics": (of(np.sort), of(np.sum)),
    "jitted function in statics": (of(add), of(subtract)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_programs_have_different_keys(name):
    one, other = DIFFERENT[name]
    assert one != other


def test_equal_programs_have_one_key():
    assert key(array(), statics=StaticArguments({"a": [1.5, None, b"x"]})) == key(
        array(), statics=StaticArguments({"a": [1.5, None, b"x"]})
    )
    many = [f"name {i}" for i in range(50)]
    assert of(frozenset(many)) == of(frozenset(reversed(many)))


def test_a_cached_walk_is_not_reused_for_a_different_value():
    """A value may get the address of a freed one, whose result must not be reused."""
    keys = ProgramKeys()
    digests = {keys.key(Program(add, (), {"statics": StaticArguments(i)})) for i in range(200)}
    assert len(digests) == 200


def _closure(value):
    return lambda: value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        _closure(1),
        lambda: 1,
        jax.jit(add.__wrapped__, donate_argnums=0),
        functools.wraps(add)(lambda: 1),
        functools.partial(sum, start=1),
        [].append,
        np.array([object()]),
        iter(()),
    ],
    ids=[
        *("object", "closure", "lambda", "second jit", "wrapper"),
        *("partial", "method", "objects", "iterator"),
    ],
)
def test_a_value_without_a_stable_identity_has_no_key(value):
    with pytest.raises(TypeError, match="no key for"):
        of(value)


def test_a_function_of_a_script_has_no_key(monkeypatch):
    """Executables do not depend on its source."""

    def scripted(x):
        return x

    scripted.__module__, scripted.__qualname__ = "__main__", "scripted"
    monkeypatch.setattr(sys.modules["__main__"], "scripted", scripted, raising=False)
    with pytest.raises(TypeError, match="no key for"):
        of(scripted)


def runner_keys(preset="llama-tiny", dtype="float32", cache=(), scheduler=(), runner=(), **model):
    """Return keys of a runner's programs by first word: step, scores, sampler, gather, scatter, mark."""
    config = EngineConfig(
        cache=CacheConfig(**{"gpu_pages": 12, "cpu_pages": 4, "chunk_tokens": 16} | dict(cache)),
        scheduler=SchedulerConfig(
            **{
                "max_num_running": 4,
                "max_num_batched_tokens": 32,
                "token_buckets": (32,),
                "max_context_tokens": 96,
            }
            | dict(scheduler)
        ),
        runner=RunnerConfig(**{"num_layer_groups": 1} | dict(runner)),
    )
    mesh = make_mesh(config.runner.tensor_parallel_size)
    model = load_model(f"random:{preset}", dtype=dtype, mesh=mesh, **model)
    made, keys = ModelRunner(model, config, mesh), ProgramKeys()
    found = {}
    for job in (*made._programs.jobs(made._executables), *made._transfers.jobs()):
        found.setdefault(job.name.split()[0], []).append(keys.key(job.program))
    own = [key for kind in ("step", "sampler") for key in found[kind]]
    assert len(own) == len(set(own)), "two programs with one key"
    return found


@functools.cache
def usual_keys():
    return runner_keys()


STEPS, COPIES, SCORES = {"step"}, {"gather", "scatter"}, {"scores"}
SETTINGS = {
    "seed of the weights": ({"seed": 5}, set()),
    "architecture": ({"preset": "opt-tiny"}, STEPS | COPIES | SCORES),
    "context of the model": ({"max_position_embeddings": 4096}, STEPS | SCORES),
    "dtype": ({"dtype": "bfloat16"}, STEPS | COPIES | SCORES),
    "weights in 8 bits": ({"weights_dtype": "int8"}, STEPS | SCORES),
    "pages": ({"cache": {"gpu_pages": 13}}, STEPS | COPIES),
    "host pages": ({"cache": {"cpu_pages": 5}}, set()),
    "page size": (
        {
            "cache": {"chunk_tokens": 32},
            "scheduler": {"max_num_batched_tokens": 36, "token_buckets": (32, 36)},
        },
        STEPS | COPIES | SCORES,
    ),
    "buckets": ({"scheduler": {"token_buckets": (24, 32)}}, STEPS),
    "samples of a step": ({"scheduler": {"token_buckets": (3, 32)}}, STEPS | {"sampler"}),
    "context": ({"scheduler": {"max_context_tokens": 128}}, STEPS),
    "running": ({"scheduler": {"max_num_running": 5}}, STEPS | {"sampler"}),
    "layer groups": ({"runner": {"num_layer_groups": 2}}, STEPS | COPIES),
    "back end": ({"runner": {"attention_backend": "xla"}}, STEPS),
    "log-probabilities": ({"runner": {"max_logprobs": 3}}, SCORES | {"sampler"}),
    "banned ids": ({"runner": {"max_banned_ids": 3}}, STEPS | {"sampler"}),
    "devices": ({"runner": {"tensor_parallel_size": 2}}, STEPS | COPIES | SCORES | {"sampler", "mark"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_keys_of_a_runner(name):
    """Programs that a setting affects have other keys; the others are found again."""
    changed, kinds = SETTINGS[name]
    found = runner_keys(**changed)
    different = {kind for kind, keys in found.items() if set(keys) - set(usual_keys()[kind])}
    assert different == kinds
