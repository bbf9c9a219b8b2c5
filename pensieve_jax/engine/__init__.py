"""The only place where jax meets policy: device state, compiled steps, and the loop that drives them."""
