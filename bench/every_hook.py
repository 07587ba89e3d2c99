"""The addon of ``bench/addons.py``, in a file of its own like other addons."""

from ztunnel.addons import Addon, Deny, Facts, MeshSummary, Metric, Record, Verdict


class Every(Addon):
    """An addon with every hook, each as short as possible."""

    def connecting(self, facts: Facts) -> Verdict | None:
        """Return no verdict."""
        return None

    def accepting(self, facts: Facts) -> Deny | None:
        """Return no verdict."""
        return None

    def opened(self, facts: Facts) -> None:
        """Do nothing."""

    def closed(self, record: Record) -> None:
        """Do nothing."""

    def refused(self, record: Record) -> None:
        """Do nothing."""

    def mesh_changed(self, summary: MeshSummary) -> None:
        """Do nothing."""

    def metrics(self) -> list[Metric]:
        """Return none."""
        return []
