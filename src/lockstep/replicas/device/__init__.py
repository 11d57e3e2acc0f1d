"""What the engine needs of a GPU: streams, events, memory, CUDA graphs, and copies to and from the host.

    driver         the interface to a GPU, and the choice of a driver for a logical device
    cuda           the driver for CUDA
    memory         what a logical device's memory pool has taken, against its ``memory_limit``
    streams        how the replicas of GPUs take turns: their streams, generators and events
    async_scalars  numbers copied to the host without waiting for the device
    host_syncs     which operators make the host wait for the device

Begin with ``driver``. All of it can be tested on a CPU: ``tests/stand_in`` has a driver that records its calls.
"""
