"""The Redis storage keeps the contract: on one node, behind Sentinel, and on a Cluster of three masters."""

from djqueue.testing import contract

from .cases import OnCluster, OnSentinel, OnSingle


class TestSingle(OnSingle, contract.StorageContract):
    pass


class TestSentinel(OnSentinel, contract.StorageContract):
    pass


class TestCluster(OnCluster, contract.StorageContract):
    pass
