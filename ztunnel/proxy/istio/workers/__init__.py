"""More cores for the connections of pods: child processes carry them, the main process knows and decides.

START HERE: ``main.py`` is the main process's half, ``worker.py`` the child's, ``link.py`` says what they tell each
other. Control plane, certificates, ZDS, DNS, admin, metrics and the log stay the main process's alone.
"""
