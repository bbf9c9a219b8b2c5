"""From a turn to sampled tokens: code shared by every engine that decodes. Only `device` needs jax."""
