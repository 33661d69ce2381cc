"""Sharded parameters (ZeRO stage 3): a bucket is whole only while something reads it. See csrc/residency.

residency: the face of csrc/residency; new_buckets: how buckets come there
written_alone: what one rank writes while the others go on
takeover: which shards a new optimizer takes over from a deleted one
mapped_shards: who reads whose shards in a device's memory; device_memory: how another process gets at that
"""
