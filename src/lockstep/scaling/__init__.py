"""``lockstep bench scaling``: what N replicas bring over one device, and where the time of their steps goes.

    settings -> plan -> [fresh process a configuration, in turn, several rounds] -> figures -> Markdown, JSON, HTML

Every number comes from one run on one machine; published numbers are shown beside it, marked as another machine's.
"""
