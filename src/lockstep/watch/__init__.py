"""What only looks at a step while it runs, and changes none of its numbers.

    rows.py    follows the rows of a shard through a step, and finds losses that combine rows

Begin there.
"""
