"""Steps on JAX devices: everything behind `engine.runner.Runner` and `engine.transfers.Transfers`."""
