"""Sparse training: masks that the update keeps, chosen exactly from all ranks' shards."""
