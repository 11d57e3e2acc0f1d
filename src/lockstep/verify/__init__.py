"""``lockstep verify``: why N replicas differ from one. The user's unchanged program runs twice, and is compared.

child: N replicas --.
child: one replica --+-- compare, update by update -- explain: a hypothesis, an experiment -- report
"""
