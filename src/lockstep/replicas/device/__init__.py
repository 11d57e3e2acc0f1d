"""What the engine needs of a GPU: streams, events, memory, CUDA graphs, and copies to and from the host.

    driver      the calls of torch.cuda, the driver of a logical device, and scalars that arrive later on the host
    streams     replicas on GPUs: the account of their memory, their slots, and the order of work on their streams
    host_syncs  which operators make the host wait for the device

Begin with ``driver``. All of it can be tested on a CPU: ``tests/stand_in`` has a driver that records its calls.
"""
