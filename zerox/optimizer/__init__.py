"""The parts of one optimizer, each an object that takes the core: Note [Parts of an optimizer] in core.py."""
