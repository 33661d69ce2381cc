"""The optimizer's state, for state_dict() and load_state_dict().

optimizer_state: state_dict(), load_state_dict(), full_state_dict(); failed_load: a load that raised on some ranks
  only
shown_state: what optimizer.state shows; live_tensor: a whole tensor there; written_state: takes in what users write
state_dict: a rank's share; full_state: whole tensors; one_state: one parameter's
sliced_state: a bucket's state as segments of whole tensors; fill: fills a parameter's part of it from any form
state_changes: what other ranks may read, and when; pulled_state: what they have, read where it lies; pulled_tensor: a
  tensor that is whole where it is looked at
codes: state of 8 bits; row_state: that of tables; own_state: of each rank's own parameters
begun_state: a parameter's state, of which other ranks know what there is
dcp_request: what torch.distributed.checkpoint wants
"""
