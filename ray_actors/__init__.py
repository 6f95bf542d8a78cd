"""Ray around weightdelta: attach to running trainer actors, publish, commit.

Only this package imports ray. ``attach`` is the way in; the rest runs inside actors.
"""
