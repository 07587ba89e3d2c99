"""Records in SQLite when two workloads first connect to each other.

    ztunnel proxy --addon audit_log.py --addon-option audit-log.file=/var/lib/ztunnel/audit.db
    sqlite3 /var/lib/ztunnel/audit.db 'select * from first_seen order by at'

Known pairs are kept in memory, and only new pairs are written to the file. Several workers can share the file.
"""

import sqlite3
import time
from dataclasses import dataclass

from ztunnel.addons import Addon, Facts

_TABLE = """
create table if not exists first_seen (
    at text, direction text, source text, source_identity text, destination text, port integer, service text,
    primary key (direction, source, destination, port)
)
"""
_MOST_PAIRS = 100_000


class AuditLog(Addon):
    """Writes a row for each new combination of two workloads and a port."""

    name = "audit-log"
    budget_us = 5000.0  # the first connection of a pair waits for the disk

    @dataclass(frozen=True)
    class Options:
        """The path of the database."""

        file: str

    def configured(self, options: Options) -> None:
        self.database = sqlite3.connect(options.file, isolation_level=None, timeout=0.05)
        self.database.execute("pragma journal_mode = wal")
        self.database.execute("pragma synchronous = off")  # a crash of the machine can lose the last rows
        self.database.execute(_TABLE)
        rows = self.database.execute("select direction, source, destination, port from first_seen")
        self.seen: set[tuple[str, str, str, int]] = set(rows.fetchmany(_MOST_PAIRS))

    def opened(self, facts: Facts) -> None:
        source = _called(facts.source.namespace, facts.source.name, facts.source_address)
        destination = _called(facts.destination.namespace, facts.destination.name, facts.destination_address)
        pair = (str(facts.direction), source, destination, facts.destination_port)
        if pair in self.seen:
            return
        if len(self.seen) >= _MOST_PAIRS:
            self.seen.clear()
        self.seen.add(pair)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = (at, pair[0], source, facts.source_identity, destination, pair[3], facts.service)
        self.database.execute("insert or ignore into first_seen values (?, ?, ?, ?, ?, ?, ?)", row)

    def done(self) -> None:
        self.database.close()


def _called(namespace: str, name: str, address: str) -> str:
    return f"{namespace}/{name}" if name else address
