"""Strategies: what runs a step, and on which replicas.

Begin with ``base``, which has everything that does not depend on where replicas run. ``mirrored`` is one process,
``multi_worker`` many, ``parallel`` many with a divided model. ``average_loss`` has the loss helpers.
``lockstep.watch`` looks at what a step does.
"""
