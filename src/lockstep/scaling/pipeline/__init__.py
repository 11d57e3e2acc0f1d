"""``lockstep bench pipeline``: how long the workers of a pipeline are idle under each schedule, beside theory.

settings -> [fresh workers a schedule, in turn, several rounds] -> timetables -> figures -> Markdown, JSON, SVG
"""
