"""Measurements that ``lockstep bench`` makes on the user's machine.

``lockstep bench scaling`` compares N replicas with one device:

    configurations -> runner (each in a fresh process, several rounds) -> report (JSON, HTML)
    recipes (module, data, loss) -> measure (what a process does: trains, and times the parts of each step)

``lockstep bench pipeline`` measures how long the workers of a pipeline idle: ``pipeline_bench``. ``plots`` draws both,
``machine`` describes where a run was made. Begin with ``runner.measure_scaling``.
"""
