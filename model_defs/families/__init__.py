"""Model families, one module each. A module ends with its `FAMILY`, which is a row of `registry.FAMILIES`.

A family uses the shared modules, and no other family. Its docstring describes its differences, and the
behavior of its chat template that matters to `pensieve_jax.text.chat`.
"""
