"""From a turn to sampled tokens: what every engine that decodes shares. Without jax, `device` apart."""
