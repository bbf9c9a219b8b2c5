"""Model families, a module each, which ends in its `FAMILY`; `registry.FAMILIES` has a row for each.

A family knows what families share, and no other family. Its docstring says what sets it apart, and what its
chat template does where `pensieve_jax.text.chat` has to know.
"""
