"""Code that all processes of this project share: clocks, tasks, accepted sockets, the heap, readers of
settings.
"""
