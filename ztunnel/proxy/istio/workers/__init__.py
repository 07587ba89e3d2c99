"""Uses several CPU cores. Worker processes carry the pods' connections, and the main process keeps the state that
the workers share.

START HERE: ``main.py`` runs in the main process, ``worker.py`` in a worker, ``messages.py`` defines their
messages. Control plane, certificates, ZDS, DNS, admin, metrics and the log stay in the main process.
"""
