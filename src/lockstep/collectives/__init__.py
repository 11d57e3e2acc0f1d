"""Sums, gathers and broadcasts: between the replica threads of a process, and between the workers of a job.

    per_replica, tensor_like          values that differ by replica; what reads as a tensor (variables)
    replica_barrier                   where replica threads meet, and who may issue work meanwhile
    communicator                      the collectives between workers (abstract), and the one of a single worker
    distributed, mesh_communicator    over torch.distributed; and one that counts each replica of a device mesh once
    process_group                     gloo and NCCL groups whose waits are watched
    reduce                            reduce and gather over all replicas of all workers; the differentiable forms
    options                           CommunicationOptions

Begin with ``communicator`` and ``replica_barrier``; the others build on these.
"""
