"""A worker's membership of its job: the store at the chief, the roll call at the start, and knowing who was lost."""
