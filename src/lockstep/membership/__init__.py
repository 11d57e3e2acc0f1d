"""A worker's membership of its job: joining it, and noticing when another worker is lost.

Begin with ``membership``: ``join`` returns the ``Membership`` that all other packages use. Each module imports only
those above it:

failure_report  why a job ended early; every worker raises the same error
store           the key-value store of the job, its keys, and clients that cannot hang their callers
heartbeat       every worker's heartbeat, and the monitor that finds a lost worker
worker_info     what a worker tells the others when it joins
rendezvous      serves or reaches the store, and waits until all workers are there and agree
"""
