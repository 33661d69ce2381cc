"""Masks: which elements of parameters are trained, and when that changes.

sparsity: the face; targets: finds parameters by names; schedules: when masks change
choose: what they keep; select: the k-th smallest over ranks; shards: what this rank has
"""
