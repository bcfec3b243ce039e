"""The Redis storage keeps the contract: on one node, behind Sentinel, and on a Cluster of three masters."""

import pytest

from djqueue.testing import contract
from tests.storage.thorough import ManyExamples

from .cases import OnCluster, OnSentinel, OnSingle

# test_access_list.py runs the same contract on one node, as a user with few rights.


@pytest.mark.thorough
class TestSingle(OnSingle, ManyExamples, contract.StorageContract):
    pass


@pytest.mark.thorough
class TestSentinel(OnSentinel, contract.StorageContract):
    pass


@pytest.mark.thorough
class TestCluster(OnCluster, contract.StorageContract):
    pass


@pytest.mark.redis
class TestClusterAcrossMasters(
    OnCluster,
    contract.FlowsContract,
    contract.LimitersContract,
    contract.MovingContract,
    contract.WorkersContract,
):
    """Operations on several queues, whose keys are on different masters."""
