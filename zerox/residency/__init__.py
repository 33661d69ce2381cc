"""Sharded parameters (ZeRO stage 3): a bucket is whole only while something reads it. See csrc/residency."""
