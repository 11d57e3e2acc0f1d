"""Starts the workers of a job: ``lockstep run`` and ``ls.launch``, over the agent of ``torch.distributed.elastic``.

This is the only package that writes environment variables, all of them for the workers. Begin with ``api`` (the public
function) and ``jobs`` (a function or a program in workers, and each worker's share of the host). ``jobs`` uses:

agent            torch's elastic agent: starts, watches, restarts and ends the workers of this host
rendezvous       how the launchers of several hosts find each other
elastic_meeting  the same in an elastic job, again and again: who is there, and what the first launcher decides
elastic_plan     that decision: who starts how many workers, or why the job ends
store_link       a launcher's connection to the store of an elastic job
elastic_agent    the agent of an elastic job: tells lost workers from failures, and takes in those that come back
output           what the workers print: log files, and the terminal
worker           the life of a worker process, and the files that it shares with the launcher; imports no torch
serialization    functions, results and errors as bytes for another process
failures         which worker failed first, and how
hang_dump        where each worker stood when its time was up
batch_size_finder ``ls.find_batch_size``: a search by training steps in fresh processes
side_effects     undoes what torch's launcher does to the process around it
"""
