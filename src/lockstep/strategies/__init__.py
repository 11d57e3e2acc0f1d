"""Strategies: what runs a step, and on which replicas.

Begin with ``base``, which has everything that does not depend on where replicas run. ``mirrored`` is one process,
``multi_worker`` many, ``parallel`` many with a divided model. ``losses`` has the loss helpers. ``first_run``
and ``backward_check`` look at a step's first run for what would give other numbers than one device, ``row_check`` at
some later runs too, by ``lockstep.watch``.
"""
