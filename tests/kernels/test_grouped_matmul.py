"""Experts' MLPs: the grouping of rows, both back ends against float64, and independence of neighbours."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.grouped_matmul import (
    ExpertArgumentError,
    ExpertTile,
    GroupedRows,
    GroupSpec,
    Products,
    api,
    block_rows,
    choose_backend,
    default_products,
    device_limit,
    expert_mlp,
    group_rows,
    shape_limit,
    sum_choices,
)
from pallas_kernels.grouped_matmul.groups import HEADER_LEN, NUM_FIELDS, PIECE_ROWS
from tests.kernels.cross_lower import lower_for_cuda

SHAPE = jax.ShapeDtypeStruct
# num_experts, num_chosen, hidden_size, width of an expert.
QWEN3_30B, MIXTRAL = (128, 8, 2048, 768), (8, 2, 4096, 14336)
TILES = {
    "few": Products(ExpertTile(8, 64, 3, swapped=True, block_k=128), ExpertTile(8, 64, 2, swapped=True)),
    "wide columns": Products(ExpertTile(16, 64, 2, swapped=True), ExpertTile(16, 128, 2, swapped=True)),
    "many": Products(ExpertTile(64, 64, 2, swapped=False), ExpertTile(64, 128, 2, swapped=False)),
    "two warpgroups": Products(ExpertTile(128, 64, 2, swapped=False), ExpertTile(128, 128, 2, swapped=False)),
}
SPREADS = {  # experts of each token, of 5
    "random": lambda rng, num_tokens, num_chosen: np.stack(
        [rng.permutation(5)[:num_chosen] for _ in range(num_tokens)]
    ),
    "all to the same": lambda rng, num_tokens, num_chosen: np.tile([3, 1], (num_tokens, 1))[:, :num_chosen],
}


def draw(num_tokens, num_chosen, *, num_experts=5, hidden_size=128, width=64, seed=0, dtype=jnp.bfloat16):
    """Draw x, experts, weights, gate_up and down."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, hidden_size))
    experts = np.stack([rng.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)])
    weights = rng.uniform(0.1, 1, (num_tokens, num_chosen))
    gate_up = rng.standard_normal((num_experts, 2, width, hidden_size)) / np.sqrt(hidden_size)
    down = rng.standard_normal((num_experts, hidden_size, width)) / np.sqrt(width)
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(experts, jnp.int32),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(gate_up, dtype),
        jnp.asarray(down, dtype),
    )


def in_float64(x, experts, weights, gate_up, down):
    """Compute expert by expert; results between the products are not rounded."""
    x, weights, gate_up, down = (np.asarray(array, np.float64) for array in (x, weights, gate_up, down))
    y = np.zeros_like(x)
    for token, chosen in enumerate(np.asarray(experts)):
        for expert, weight in zip(chosen, weights[token], strict=True):
            gate, up = gate_up[expert] @ x[token]
            y[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y


def assert_equals(got, arrays):
    """Check equality except for two roundings to bfloat16 of each expert's result, and one of the sum."""
    tolerance = 1e-5 if got.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), in_float64(*arrays), rtol=0, atol=tolerance)


def interpreted(*arrays, name, num_counted=None):
    return expert_mlp(
        *arrays,
        num_counted,
        backend="pallas_mosaic_gpu",
        products=TILES[name],
        interpret=True,
        num_programs=2,
    )


on_xla = jax.jit(functools.partial(expert_mlp, backend="xla"))


def check_groups(spec: GroupSpec, experts: np.ndarray, grouped: GroupedRows, num_counted: int) -> None:
    """Check every place, and that items of the list cover each expert's rows once, in the order of tokens."""
    places, tokens, blocks = (np.asarray(part) for part in grouped)
    assert (places[num_counted:] == spec.num_rows).all()
    np.testing.assert_array_equal(
        tokens[places[:num_counted]], np.arange(num_counted)[:, None] + 0 * experts[:1]
    )
    fields = blocks[HEADER_LEN:].reshape(-1, NUM_FIELDS)
    assert len(blocks) == spec.list_len and blocks[0] <= spec.max_blocks
    covered, last_end = [], 0
    for number in range(blocks[0]):
        expert, first_block, first_row, num_rows = fields[number].tolist()
        start = (number - first_block) * spec.block_rows
        assert first_block <= number and 0 <= start < num_rows, "no block is empty"
        assert first_row % PIECE_ROWS == 0 and first_row + start >= last_end
        assert first_row + start + spec.block_rows <= spec.num_rows, "a copy stays inside the array"
        last_end = first_row + min(start + spec.block_rows, num_rows)
        covered += [(expert, row) for row in range(first_row + start, last_end)]
    expected = []
    for expert in range(spec.num_experts):
        mine = np.argwhere(experts[:num_counted] == expert)
        expected += [(expert, int(places[token, choice])) for token, choice in mine]
    assert covered == expected


@pytest.mark.parametrize("block", [8, 16, 64])
def test_groups(block):
    rng = np.random.default_rng(block)
    group = jax.jit(group_rows, static_argnums=0)
    for num_tokens, num_experts, num_chosen in ((1, 8, 8), (5, 7, 1), (40, 3, 2), (300, 130, 8)):
        spec = GroupSpec(num_tokens, num_chosen, num_experts, block)
        for skewed in (False, True):
            chances = rng.dirichlet(np.full(num_experts, 0.05 if skewed else 10)) + 1e-9
            chosen = [
                rng.choice(num_experts, num_chosen, replace=False, p=chances / chances.sum())
                for _ in range(num_tokens)
            ]
            experts = np.stack(chosen).astype(np.int32)
            for counted in {0, num_tokens // 2, num_tokens}:
                check_groups(spec, experts, group(spec, experts, jnp.int32(counted)), counted)
            check_groups(spec, experts, group(spec, experts), num_tokens)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spread", SPREADS)
def test_xla(spread, dtype):
    arrays = list(draw(21, 2, dtype=dtype))
    arrays[1] = jnp.asarray(SPREADS[spread](np.random.default_rng(1), 21, 2), jnp.int32)
    assert_equals(on_xla(*arrays), arrays)


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize(
    ("name", "num_tokens", "spread"),
    [
        pytest.param("few", 1, "random", marks=pytest.mark.long),
        ("few", 13, "all to the same"),
        pytest.param("wide columns", 33, "random", marks=pytest.mark.long),
        pytest.param("many", 90, "random", marks=pytest.mark.long),
        ("two warpgroups", 150, "random"),
        pytest.param("two warpgroups", 150, "all to the same", marks=pytest.mark.long),
    ],
)
def test_interpreted(name, num_tokens, spread):
    """Some experts have no rows, one, a short second block, or all rows."""
    arrays = list(draw(num_tokens, 2))
    arrays[1] = jnp.asarray(SPREADS[spread](np.random.default_rng(2), num_tokens, 2), jnp.int32)
    assert_equals(interpreted(*arrays, name=name), arrays)
    assert not get_races().races_found


@pytest.mark.long
@pytest.mark.usefixtures("checked_interpreter")
def test_one_row_of_one_expert_beside_many_of_another():
    arrays = list(draw(20, 1))
    arrays[1] = jnp.full((20, 1), 4, jnp.int32).at[7].set(0)
    assert_equals(interpreted(*arrays, name="few"), arrays)
    assert not get_races().races_found


@pytest.mark.parametrize("name", [None, "few", pytest.param("many", marks=pytest.mark.long)])
def test_padding_gets_zeros_and_changes_nothing(name):
    """Padding may hold anything, and reads no weights: those of its experts may be NaN."""
    run = on_xla if name is None else functools.partial(interpreted, name=name)
    arrays = list(draw(12, 2))
    arrays[1] = arrays[1].at[:5].set(jnp.array([0, 3])).at[5:].set(jnp.array([1, 2]))
    expected = run(*arrays)
    damaged = [
        arrays[0].at[5:].set(jnp.nan),
        *arrays[1:3],
        *(one.at[jnp.array([1, 2])].set(jnp.nan) for one in arrays[3:]),
    ]
    got = run(*damaged, num_counted=jnp.int32(5))
    np.testing.assert_array_equal(got[:5], expected[:5])
    np.testing.assert_array_equal(got[5:], 0)
    np.testing.assert_array_equal(run(*damaged, num_counted=jnp.int32(0)), 0, err_msg="a step without tokens")


def check_independence(run, seed, num_batches, num_tokens, *, dtype, num_alone=1):
    """Compare rows beside random neighbours with the same rows moved, and alone: no bit differs."""
    rng = np.random.default_rng(seed)
    *pool, gate_up, down = draw(64, 2, seed=seed, dtype=dtype)
    pool = [np.asarray(array) for array in pool]  # whose rows are taken without compiling
    for batch in range(num_batches):
        chosen = rng.choice(64, num_tokens, replace=False)
        order = rng.permutation(num_tokens)
        together, moved = (
            np.asarray(run(*(array[rows] for array in pool), gate_up, down))
            for rows in (chosen, chosen[order])
        )
        message = f"seed {seed}, batch {batch}"
        np.testing.assert_array_equal(moved, together[order], err_msg=message)
        for place in rng.choice(num_tokens, num_alone, replace=False):
            rows = chosen[place : place + 1]
            alone = np.asarray(run(*(array[rows] for array in pool), gate_up, down))
            np.testing.assert_array_equal(alone[0], together[place], err_msg=message)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_neighbours_change_no_bit_in_xla(dtype):
    check_independence(on_xla, 3, 20, 23, dtype=dtype)


def test_other_places_change_no_bit_in_the_kernel():
    check_independence(functools.partial(interpreted, name="few"), 4, 1, 9, dtype=jnp.bfloat16, num_alone=0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["few", "many"])
def test_neighbours_change_no_bit_in_the_kernel(name):
    """Interpreted, blocks of one size are alike for every number of tokens."""
    check_independence(functools.partial(interpreted, name=name), 4, 1, 9, dtype=jnp.bfloat16)


@pytest.mark.long
def test_neighbours_change_no_bit_in_many_batches():
    """XLA runs ten thousand batches, the interpreted kernel 40."""
    for dtype, num_tokens in ((jnp.float32, 32), (jnp.bfloat16, 17)):
        check_independence(on_xla, 5, 5000, num_tokens, dtype=dtype)
    for name in TILES:
        check_independence(functools.partial(interpreted, name=name), 6, 10, 31, dtype=jnp.bfloat16)


def check_permutation(run, dtype=jnp.float32):
    """Renumber the experts: no bit of a result changes."""
    x, experts, weights, gate_up, down = draw(20, 3, dtype=dtype)
    order = np.random.default_rng(7).permutation(5)
    renumbered = jnp.asarray(np.argsort(order), jnp.int32)[experts]
    expected = run(x, experts, weights, gate_up, down)
    np.testing.assert_array_equal(run(x, renumbered, weights, gate_up[order], down[order]), expected)


def test_renumbering_experts_changes_no_bit():
    check_permutation(on_xla)


@pytest.mark.long
def test_renumbering_experts_changes_no_bit_in_the_kernel():
    check_permutation(functools.partial(interpreted, name="few"), jnp.bfloat16)


def test_the_planted_bug_of_a_sum_by_experts_is_found(monkeypatch):
    """A sum in the order of experts equals the right one up to rounding."""

    def by_experts(spec, results, places, weights):
        order = jnp.argsort(places, axis=1)
        return sum_choices(
            spec, results, *(jnp.take_along_axis(one, order, axis=1) for one in (places, weights))
        )

    monkeypatch.setattr(api, "sum_choices", by_experts)
    run = jax.jit(lambda *arrays: expert_mlp(*arrays, backend="xla"))
    arrays = draw(20, 3, dtype=jnp.float32)
    assert_equals(run(*arrays), arrays)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_permutation(run)


def test_the_planted_bug_of_a_list_without_empty_experts_is_found(monkeypatch):
    """The planted list numbers only the experts that have rows."""

    def numbered(spec, experts, num_counted=None):
        grouped = group_rows(spec, experts, num_counted)
        fields = grouped.blocks[HEADER_LEN:].reshape(-1, NUM_FIELDS)
        is_first = fields[:, 1] == jnp.arange(len(fields))
        fields = fields.at[:, 0].set(jnp.cumsum(is_first) - 1)
        return grouped._replace(blocks=jnp.concatenate([grouped.blocks[:1], fields.reshape(-1)]))

    monkeypatch.setattr(api, "group_rows", numbered)
    run = jax.jit(lambda *arrays: expert_mlp(*arrays, backend="xla"))
    arrays = list(draw(21, 2, dtype=jnp.float32))
    assert_equals(run(*arrays), arrays)
    arrays[1] = jnp.asarray(SPREADS["all to the same"](None, 21, 2), jnp.int32)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_equals(run(*arrays), arrays)


def shapes(num_tokens, num_experts, num_chosen, hidden_size, width):
    return (
        SHAPE((num_tokens, hidden_size), jnp.bfloat16),
        SHAPE((num_tokens, num_chosen), jnp.int32),
        SHAPE((num_tokens, num_chosen), jnp.float32),
        SHAPE((num_experts, 2, width, hidden_size), jnp.bfloat16),
        SHAPE((num_experts, hidden_size, width), jnp.bfloat16),
    )


@pytest.mark.parametrize(("sizes", "num_tokens"), [(QWEN3_30B, 1), (QWEN3_30B, 2048), (MIXTRAL, 128)])
def test_lowers(sizes, num_tokens):
    num_experts, num_chosen, hidden_size, width = sizes
    text = lower_for_cuda(
        functools.partial(expert_mlp, backend="pallas_mosaic_gpu"), *shapes(num_tokens, *sizes)
    )
    assert text.count("mosaic_gpu_v2") == 2
    swapped = default_products(
        block_rows(num_tokens * num_chosen, num_experts), hidden_size, width
    ).down.swapped
    assert ("swapped" in text) == swapped


@pytest.mark.parametrize(
    ("sizes", "num_tokens", "rows"),
    [
        (QWEN3_30B, 1, 8),
        (QWEN3_30B, 32, 8),
        (QWEN3_30B, 128, 16),
        (QWEN3_30B, 256, 32),
        (QWEN3_30B, 512, 64),
        (QWEN3_30B, 2048, 128),
        (MIXTRAL, 1, 8),
        (MIXTRAL, 32, 16),
        (MIXTRAL, 128, 64),
        (MIXTRAL, 512, 128),
    ],
)
def test_tiles_of_published_models(sizes, num_tokens, rows):
    """They fit into shared memory with stages to spare, and divide every expert."""
    num_experts, num_chosen, hidden_size, width = sizes
    assert block_rows(num_tokens * num_chosen, num_experts) == rows
    gate_up, down = default_products(rows, hidden_size, width)
    assert gate_up.rows == down.rows == rows and gate_up.swapped == (rows < 64)
    for tile, depth, columns, gated in (
        (gate_up, hidden_size, width, True),
        (down, width, hidden_size, False),
    ):
        assert tile.fits(gated=gated) and tile.divides(depth, columns) and tile.num_stages >= 4
        assert rows < 64 or tile.columns == 128


def test_tiles_of_narrow_parts():
    """Eight devices have 96 columns of Qwen3-30B's experts each: XLA's. Of 192, a tile takes 64."""
    assert default_products(64, 2048, 96) is None
    assert default_products(64, 2048, 192).gate_up.columns == 64
    assert default_products(8, 2048, 192).down.block_k == 64


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "pallas_mosaic_gpu"),
        ({"dtype": "float32"}, "xla"),
        ({"width": 96}, "xla"),
        ({"hidden_size": 2000}, "xla"),
        ({"device": None}, "xla"),
        ({"device": jax.devices()[0]}, "xla"),
    ],
)
def test_choice_of_the_back_end(changed, expected):
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    what = {"hidden_size": 2048, "width": 768, "dtype": "bfloat16", "device": h200} | changed
    sizes = what.pop("hidden_size"), what.pop("width")
    assert choose_backend(*sizes, **what) == expected


def test_limits_are_named():
    assert shape_limit(2048, 768, "bfloat16") is None
    assert "an expert's width on a device is 96" in shape_limit(2048, 96, "bfloat16")
    assert "an expert's hidden size is 100" in shape_limit(100, 768, "bfloat16")
    assert "not float16" in shape_limit(2048, 768, "float16")


@pytest.mark.parametrize(
    ("index", "shape", "dtype", "how", "says"),
    [
        (0, (4,), jnp.bfloat16, {}, "x and gate_up are bfloat16.4. and .*, but must be"),
        (0, (0, 128), jnp.bfloat16, {}, "none of them 0"),
        (
            0,
            (4, 128),
            jnp.float32,
            {},
            "gate_up is bfloat16.*, but must be float32.5, 2, 64, 128.",
        ),
        (
            1,
            (4, 2),
            jnp.uint32,
            {},
            "experts is uint32.4, 2., but must be int32.4, 2. for x bf",
        ),
        (1, (3, 2), jnp.int32, {}, "experts is int32.3, 2., but must be int32.4, 2."),
        (2, (4, 3), jnp.float32, {}, "weights is float32.4, 3., but must be float32.4, 2."),
        (3, (5, 3, 64, 128), jnp.bfloat16, {}, "gate_up is bfloat16.5, 3"),
        (4, (5, 128, 32), jnp.bfloat16, {}, "down is bfloat16.5, 128, 32., but must be bfloat16.5, 128, 64."),
        (0, (4, 128), jnp.bfloat16, {"backend": "cuda"}, "backend is 'cuda', but must be one of"),
        (0, (4, 128), jnp.bfloat16, {"interpret": True}, "backend is 'auto', but interpret needs"),
    ],
)
def test_refusals(index, shape, dtype, how, says):
    arrays = list(draw(4, 2))
    arrays[index] = jnp.zeros(shape, dtype)
    with pytest.raises(ExpertArgumentError, match=says):
        expert_mlp(*arrays, **how)


def test_what_the_kernel_refuses():
    kernel = {"backend": "pallas_mosaic_gpu"}
    with pytest.raises(ExpertArgumentError, match="a token chooses 1 to 5 experts"):
        expert_mlp(*draw(4, 2)[:1], jnp.zeros((4, 6), jnp.int32), jnp.zeros((4, 6)), *draw(4, 2)[3:])
    with pytest.raises(ExpertArgumentError, match="not float32; use backend 'xla'"):
        expert_mlp(*draw(4, 2, dtype=jnp.float32), **kernel)
    with pytest.raises(ExpertArgumentError, match="width on a device is 96; use backend 'xla'"):
        expert_mlp(*draw(4, 2, width=96), **kernel)
    good = ExpertTile(8, 64, 2, swapped=True)
    for bad in (
        ExpertTile(16, 64, 2, swapped=True),  # other rows
        ExpertTile(8, 64, 1, swapped=True),
        ExpertTile(8, 192, 2, swapped=True),  # three warpgroups
        ExpertTile(8, 64, 2, swapped=True, block_k=256),
        ExpertTile(8, 64, 2, swapped=False),
        ExpertTile(8, 64, 30, swapped=True),
    ):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(ExpertArgumentError, match=r"products is .* must divide experts \[64, 128\]"):
                expert_mlp(*draw(4, 2), products=Products(*pair), **kernel)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "num_tokens"), [*itertools.product((QWEN3_30B, MIXTRAL), (1, 5, 128, 200, 2048))]
)
def test_on_a_gpu(sizes, num_tokens):
    """Results equal XLA's, repeat bit for bit, and do not change with neighbours, even of NaN."""
    if device_limit(jax.devices()[0]) is not None:
        pytest.skip("the kernel does not run here")
    num_experts, num_chosen, hidden_size, width = sizes
    keys = jax.random.split(jax.random.key(num_tokens), 5)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    x = normal(keys[0], (num_tokens, hidden_size))
    scores = jax.random.normal(keys[1], (num_tokens, num_experts))
    experts = jax.lax.top_k(scores, num_chosen)[1]
    weights = jax.random.uniform(keys[2], experts.shape)
    gate_up = normal(keys[3], (num_experts, 2, width, hidden_size)) * hidden_size**-0.5
    down = normal(keys[4], (num_experts, hidden_size, width)) * width**-0.5
    run = jax.jit(functools.partial(expert_mlp, backend="pallas_mosaic_gpu"))
    got = run(x, experts, weights, gate_up, down)
    expected = on_xla(x, experts, weights, gate_up, down)
    scale = float(jnp.abs(expected.astype(jnp.float32)).max())
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0, atol=0.02 * scale
    )
    order = np.random.default_rng(0).permutation(num_tokens)
    for _ in range(3):
        moved = run(x[order], experts[order], weights[order], gate_up, down)
        np.testing.assert_array_equal(moved, got[order])
        if num_tokens > 1:
            beside = run(x.at[1:].set(jnp.nan), experts.at[1:].set(experts[0]), weights, gate_up, down)
            np.testing.assert_array_equal(beside[0], got[0])


@pytest.mark.gpu
def test_random_batches_on_a_gpu():
    """Ten thousand batches in the two forms of the kernel: a row's bits depend on the row alone."""
    if device_limit(jax.devices()[0]) is not None:
        pytest.skip("the kernel does not run here")
    num_rows = 256
    x, experts, weights, gate_up, down = draw(num_rows, 4, num_experts=32, hidden_size=256)
    for products in (None, TILES["two warpgroups"]):
        run = functools.partial(expert_mlp, backend="pallas_mosaic_gpu", products=products)

        def count_differences(key, expected, run=run):
            rows = jax.random.permutation(key, num_rows)[:64]
            y = run(x[rows], experts[rows], weights[rows], gate_up, down)
            return (y != expected[rows]).sum()

        @jax.jit
        def count_all(key, expected, count=count_differences):
            keys = jax.random.split(key, 1000)
            return jax.lax.map(lambda key: count(key, expected), keys).sum()

        firsts = range(0, num_rows, 64)
        parts = [run(x[i : i + 64], experts[i : i + 64], weights[i : i + 64], gate_up, down) for i in firsts]
        for seed in range(5):
            assert int(count_all(jax.random.key(seed), jnp.concatenate(parts))) == 0, (products, seed)
