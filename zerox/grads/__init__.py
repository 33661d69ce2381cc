"""Gradients from backward to the shards that step() reads: what stands in p.grad, norms, scales. See csrc/grads."""
