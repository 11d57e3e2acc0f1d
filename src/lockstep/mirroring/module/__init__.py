"""The mirrored module. Begin with ``module``.

``copies`` makes one copy for each replica. Between steps ``copy_follower`` brings what the user has changed on the
module to all copies: ``snapshot`` finds what was set, ``watched_tensors`` what was written in place. ``buffers``
averages buffers. ``batch_norm`` sums statistics over all replicas, and ``compile`` is torch.compile for all copies at
once. ``wrappers`` is about tensors that hold tensors, as quantised weights do.
"""
