"""The programs and tools that people run with Lockstep: the command, recipes, planner, verifier, benchmarks and doctor.

They use the engine, ``lockstep``, which imports nothing of them.
"""
