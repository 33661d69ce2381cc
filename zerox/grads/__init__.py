"""Gradients from backward to the shards that step() reads. See csrc/grads.

grads: the face of csrc/grads
placeholder: stands in p.grad for a gradient that has left; placeholder_operators: what operators do to it
grad_operators: what users did to gradients in place, until their owners do it
asked: which parameters a call is about; norm: exact norms over all ranks; grad_scale: what all gradients are
  multiplied by, and whether the step is skipped
partial_grads: sums over a tensor-parallel axis
other_reducers: whether a DistributedDataParallel averages too
"""
