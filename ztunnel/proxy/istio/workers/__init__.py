"""More cores for the connections of pods: child processes carry them, the main process keeps the state and
decides.

START HERE: ``main.py`` is the main process's half, ``worker.py`` the child's, ``messages.py`` defines their
messages. Control plane, certificates, ZDS, DNS, admin, metrics and the log stay in the main process.
"""
