"""The path of a batch from the user's source to the replicas' devices, in three layers.

    source  --sources-->  reader (readers, sharding) read ahead in a thread (prefetch)  -->  devices (transfer)

``dataset`` joins them to ``DistributedDataset`` and ``PerReplicaDataset``; begin reading there. ``worker_sync`` keeps
several workers in step while they iterate. ``structure`` walks nested batches, and ``list_reader`` finds the lists
that hold one item a row. ``random_state`` saves and restores the random generators of a source.

``structure`` and ``random_state`` import none of the others, ``dataset`` all of them.
"""
