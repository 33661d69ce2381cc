"""DistributedDataParallel: what torch's does for a module, beside averaging.

distributed_data_parallel: the class; arguments, placement, buffers, refusals: its arguments and names
first_values: rank 0's values where it is built; values: sends plain tensors
averaging: who averages, and when; begin: where a backward begins
left_over: gradients that no optimizer of zerox holds; unbucketed: those of them that fit in no bucket
stand_in: what frameworks ask of a reducer; comm_hooks: hooks that reduce_dtype stands for
join: uneven batches
"""

from zerox.wrapper.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
