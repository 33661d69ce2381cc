"""Gradients that are rows of tables (param groups with sparse=True), and their update. See csrc/rows."""
