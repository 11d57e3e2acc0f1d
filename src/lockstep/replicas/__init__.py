"""Replicas: one copy of the step function per logical device, each run by a thread of its own.

    runner        one run: a job to each thread, then all results or the first error
    threads       the persistent threads
    caller_state  the caller's thread-local state, which is set again in the replicas' threads
    issue_policy  how many replicas of one device issue work at once
    barrier       where the threads of a run meet
    issue_gate    which of them may issue work meanwhile
    context       what a step function sees of its replica: ids, device, collectives
    compiled      code that torch.compile makes: the replica's own random numbers, faster products
    owner         what replicas and mirrored objects use of their strategy
    conditions    devices and versions that the bits of a training depend on
    watcher       the moments of a run that the step guard, front ends and ``lockstep verify`` look at
    rng, device, cpu   random numbers; GPUs; what is tuned for CPUs

Begin with ``runner``. Below it are ``collectives`` (sums of values) and ``config`` (devices).
"""
