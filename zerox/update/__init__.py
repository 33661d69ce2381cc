"""The update of this rank's shards, by kernels or by an optimizer class of torch's kind.

update: kernel calls, with several small buckets in one launch
matrices: the matrices that lie whole on this rank, by Muon; momentum: their averages; newton_schulz: several at
    a time; together: several tensors through one operator
local_optimizer_update, local_optimizer_bucket: an optimizer class, on this rank's segments
"""
