"""Steps on JAX devices: the implementation of `engine.runner.Runner` and `engine.transfers.Transfers`."""
