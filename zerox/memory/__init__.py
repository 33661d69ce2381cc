"""Tensors in their places: flat parameters, and the state of each element.

flat: parameters side by side; stored: a number kept for each element; bucket: both; state_layout: where state lies of
  which there is less
forms: converts state from one form to another, 8 bits too; pages: the memory that it lies in
left_bucket: what a deleted optimizer has left to its parameters
mask: which elements are trained, a bit each
row_table, row_owners: tables, and who owns which rows; table_buffer: the memory of one that is sharded
one_param: one parameter over all ranks, for calls about it
grad_dtype: torch's own Tensor.grad_dtype; torch_optimizer: torch's base class, without Dynamo's import
"""
