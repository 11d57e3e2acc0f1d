"""What the engine needs of a GPU: streams, events, memory, CUDA graphs, and copies to and from the host.

    driver         the calls of torch.cuda, and the driver of a logical device
    memory         the memory pool of a logical device, against its ``memory_limit``
    streams        the order of work between replicas on GPUs: their slots, streams, generators and events
    async_scalars  numbers copied to the host without waiting for the device
    host_syncs     which operators make the host wait for the device

Begin with ``driver``. All of it can be tested on a CPU: ``tests/stand_in`` has a driver that records its calls.
"""
