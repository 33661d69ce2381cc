"""The optimizer's state, for state_dict() and load_state_dict()."""
