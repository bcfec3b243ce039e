"""Snapshots of Redis on each topology."""

from djqueue.testing import contract

from .cases import OnCluster, OnSingle


class TestSingle(OnSingle, contract.SnapshotsContract):
    """A single server."""


class TestCluster(OnCluster, contract.SnapshotsContract):
    """Several nodes."""
