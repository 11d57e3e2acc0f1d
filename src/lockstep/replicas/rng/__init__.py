"""Each replica's own random numbers, so that dropout in threads is reproducible and differs between replicas.

    replica_rng        the function mode that gives random functions on CPU tensors the replica's own generator
    ops                torch's functions that draw but take no generator, written again with one
    generators         the replicas' generators: their seeds, and the states that checkpoints save
    default_generator  what ``torch.get_rng_state`` and its like mean in a replica

Begin with ``replica_rng``. Numbers drawn on a GPU come from the GPU's default generator, which ``device.streams``
swaps.
"""
