"""Tensors in their places: flat parameters, and the state of each element."""
