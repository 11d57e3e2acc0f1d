"""Sums, gathers and broadcasts of values: of the replicas of a process, and between the workers of a job.

    per_replica    values that differ by replica, and the base class of variables
    sum_order      the one order in which values of replicas are added, so that a sum has the same bits on all layouts
    communicator   the collectives between workers: the interface and its options, for one worker, for a mesh
    distributed    the collectives over torch.distributed
    gloo_sums      sums of tensors between workers in that order, over gloo
    process_group  gloo and NCCL groups whose waits are watched
    reduce         reduce and gather over all replicas of all workers; the differentiable forms

Begin with ``communicator``; ``reduce`` builds on it. Where replica threads meet is ``replicas/barrier``.
"""
