"""Integers only: what will lie where, and what may be asked for together. Standard library, no torch.

span, layout: ranges of elements, and where every element of a bucket lies
cut, rectangles: the part of a tensor that tensor parallelism left a rank, and a rank's part as a checkpoint describes
  it
file_runs: rectangles of tensors that lie row-major in files
buckets: which parameters share a bucket; owners: which rank has those that lie whole on one; state_layout: of their
  state, where it has other shapes
form, kept: how a number is stored for each element, and what is kept for one
stage: a ZeRO stage as data
materialize: in which order parameters on the meta device get their first values
plan: what an optimizer is built from; rank_bytes adds up its bytes, with peak for gradients and resident for stage 3
choices, combinations: the options, and which go together, by rulings; pairs_of_tables,
  pairs_of_matrices: the same for sparse=True, and for Muon
weight_split: which weights share a file of a model's folder
environment: the environment variables, and what each means
"""
