"""Gradients that are rows of tables (param groups with sparse=True), and their update. See csrc/rows.

rows: the tables of an optimizer; row_gradient: one table's gradient; row_refusals: what tables do not go with
device_rows: moves rows on an accelerator, as csrc/rows does on the host: device_table has one table's,
  device_messages sends them, device_update updates what was reduced
"""
