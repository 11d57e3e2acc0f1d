"""Starts the workers of a job: ``lockstep run`` and ``ls.launch``, over the agent of ``torch.distributed.elastic``.

The only room that writes environment variables, all of them for the workers.
"""
