"""Starts the workers of a job: ``lockstep run`` and ``ls.launch``, over the agent of ``torch.distributed.elastic``.

This is the only package that writes environment variables, all of them for the workers. Begin with ``api`` (the public
function) and ``jobs`` (a function or a program in workers). ``jobs`` uses:

agent       torch's elastic agent: starts, watches, restarts and ends the workers of this host
rendezvous  how the launchers of several hosts find each other
resources   each worker's share of the host's cores and GPUs
output      what the workers print: log files, and the terminal
worker      the life of a worker process; imports no torch
failures    which worker failed first and how; where workers stood when their time was up
run_paths   names of files and variables that the launcher and its workers share
guards      undoes what torch's launcher does to the process around it
"""
