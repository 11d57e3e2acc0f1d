"""Each replica's own random numbers, so that dropout in threads is reproducible and differs between replicas.

    function_mode      the mode through which a replica calls torch: its random numbers, guard and replacements
    ops                torch's functions that draw but take no generator, written again with one
    generators         the replicas' generators: their seeds, and the states that checkpoints save
    default_generator  what ``torch.get_rng_state`` and its like mean in a replica

Begin with ``function_mode``. Numbers drawn on a GPU come from the GPU's default generator, which ``device.streams``
swaps.
"""
