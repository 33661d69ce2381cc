"""State that a rank reads from its owners, alone."""
