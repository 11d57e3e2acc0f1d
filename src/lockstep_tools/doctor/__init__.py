"""``lockstep doctor``: what a run depends on besides the program, and known troubles of a machine in plain words.

    software   versions, extras            threads of this process
    network    interfaces, cluster         threads of this process
    limits     files, memory, cores        threads of this process
    devices    devices, gloo, NCCL         a process of its own, since torch may hang in a driver

Each probe returns a ``Section`` and has a time limit. Begin with ``examine``. Nothing here trains, listens or sends.
"""
