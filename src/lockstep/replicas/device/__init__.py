"""What the engine needs of a GPU: streams, events, memory, CUDA graphs, and copies to and from the host.

    driver         the calls of torch.cuda, and the driver of a logical device
    memory         the memory of logical devices: what holds a replica to its limit, and the errors beyond it
    streams        replicas on GPUs: their issue slots, and the order of work on their streams
    async_scalars  scalars that arrive later on the host
    host_syncs     which operators make the host wait for the device

Begin with ``driver``. All of it can be tested on a CPU: ``tests/stand_in`` has a driver that records its calls.
"""
