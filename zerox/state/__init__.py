"""The optimizer's state as state_dict() and load_state_dict() have it."""
