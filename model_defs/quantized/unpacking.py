"""Arithmetic that quantized formats share: packed words, groups of channels, codes to float32.

Owns no format. Functions run on the devices, inside the assembly of a parameter. Every product is one of
float32 numbers, so that a later cast is the only rounding to a narrower dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np

_WORD_BITS = 32
_CHECKED_BYTES = 2**20  # per block, so that it stays in a processor's cache
_E4M3_NAN = 0x7F  # without the sign: e4m3fn has one NaN of each sign and no infinities
_E8M0_NAN, _E8M0_BIAS = 0xFF, 127


def per_word(bits: int) -> int:
    """Return the number of codes in a word of 32 bits."""
    return _WORD_BITS // bits


def unpack(words: jax.Array, bits: int, axis: int) -> jax.Array:
    """Return the unsigned codes of `words` i32 along `axis`, of `bits` each, the lowest bits first."""
    size = words.shape[axis] * per_word(bits)
    shifts = (bits * jnp.arange(per_word(bits))).astype(jnp.int32)
    shifts = shifts.reshape(-1, *[1] * (words.ndim - axis - 1))
    codes = jax.lax.shift_right_logical(*jnp.broadcast_arrays(jnp.expand_dims(words, axis + 1), shifts))
    return (codes & (2**bits - 1)).reshape(*words.shape[:axis], size, *words.shape[axis + 1 :])


def spread(values: jax.Array, group: int, size: int, axis: int) -> jax.Array:
    """Repeat each index of `axis` for the `group` channels that it stands for; the last group may be cut."""
    return jax.lax.slice_in_dim(jnp.repeat(values, group, axis), 0, size, axis=axis)


def scaled(codes: jax.Array, zeros: jax.Array | None, scales: jax.Array) -> jax.Array:
    """Return (codes - zeros) * scales in float32; codes and zeros are small integers, or codes are floats."""
    if zeros is not None:
        codes = codes.astype(jnp.int32) - zeros.astype(jnp.int32)
    return codes.astype(jnp.float32) * scales.astype(jnp.float32)


def times_power_of_two(values: jax.Array, exponents: jax.Array) -> jax.Array:
    """Return values f32 * 2**(exponents - 127), where exponents are codes of e8m0, u8 below 255."""
    # In two factors, since 2**-127 is below the normal numbers, which a device may flush to zero.
    power = exponents.astype(jnp.int32) - _E8M0_BIAS
    half = power // 2
    return values * _power_of_two(half) * _power_of_two(power - half)


def _power_of_two(power: jax.Array) -> jax.Array:
    """Return 2**power in float32, exactly, for powers of normal numbers."""
    return jax.lax.bitcast_convert_type((power + _E8M0_BIAS) << 23, jnp.float32)


def e4m3_fault(codes: np.ndarray) -> str | None:
    """Describe codes of e4m3 that are not numbers."""
    return _fault(codes, _E4M3_NAN, "e4m3")


def e8m0_fault(codes: np.ndarray) -> str | None:
    """Describe codes of e8m0 that are not numbers."""
    return _fault(codes, _E8M0_NAN, "e8m0")


def _fault(codes: np.ndarray, nan: int, dtype: str) -> str | None:
    """Describe the first code, u8, that has all bits of `nan`."""
    flat = codes.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, _CHECKED_BYTES):
        block = flat[begin : begin + _CHECKED_BYTES]
        is_nan = (block & nan) == nan
        if is_nan.any():
            place = int(is_nan.argmax())
            return f"code {block[place]} at element {begin + place}, which is NaN in {dtype}"
    return None
