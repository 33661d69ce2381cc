"""Checkpoints in logical form: each parameter by its name, state as the whole tensors that ranks have slices of."""
