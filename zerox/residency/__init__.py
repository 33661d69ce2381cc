"""Sharded parameters (ZeRO stage 3): a bucket is whole only while something reads it. See csrc/residency.

residency: the face of csrc/residency
mapped_shards: who reads whose shards in a device's memory; device_memory: how another process gets at that
"""
