"""Data: global batches into shards, on the replicas' devices, read ahead."""
