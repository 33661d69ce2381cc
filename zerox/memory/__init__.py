"""Tensors that lie where they lie: flat parameters, and what is kept for each element."""
