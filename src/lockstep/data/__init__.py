"""The path of a batch from the user's source to the replicas' devices, in three layers.

    source  --sources-->  reader (readers, sharding) read ahead in a thread (prefetch)  -->  devices (transfer)

``dataset`` joins them to ``DistributedDataset`` and ``PerReplicaDataset``; begin reading there. Beside the path:

    resumable_iteration   one iteration: its position, and how it resumes at a saved one; this uses
      streaming_sources   sources that tell their state, and the part of one that each worker reads
      random_state        the random generators of a source
      attribute_state     what else changes in samplers and datasets, by object_attributes, as plain_values
    sharding              shard sizes, and the rows of each shard
    row_loading           loads the rows of each replica alone, with a seed of its own
    worker_sync           keeps several workers in step; row_sample compares rows of their copies of the data
    structure             walks nested batches; batch_lists finds lists of one item a row, typed_batches keeps types
    ragged                values of examples of different sizes: graphs, packed sequences, nested tensors
    divide                ways to say how a batch is divided whose tensors have other than one row an example
    error_notes           what is added to a replica's error: its number, and what is special about its shard

``random_state`` imports none of the others, ``dataset`` all of them.
"""
