"""The conformance suite: tests for every storage, inherited by the test class of that storage.

    import pytest
    from djqueue.testing.clock import FakeClock
    from djqueue.testing.contract import POLICIES, StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self):
            self.clock = FakeClock()
            storage = MyStorage(clock=self.clock, policies=POLICIES)
            yield storage
            storage.close()

        def advance(self, milliseconds):
            self.clock.advance(milliseconds)

`storage` is empty and ready, and configured with `POLICIES`. Without `advance` the suite waits for
real: give such a storage short leases. Nothing but `djqueue.storage.base.Storage` is called, events
and wake-ups may come from any thread. `StorageContract` is the sum of its parts; while a storage is
being written, its test class may inherit some of them.

It needs pytest and hypothesis.
"""

try:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}: the conformance suite requires pytest and hypothesis") from error

from .belongings import BelongingsContract
from .bulk_writes import BulkWritesContract
from .cancelling import CancellingContract
from .capacity import CapacityContract
from .case import POLICIES, StorageCase
from .claims import ClaimsContract
from .concurrency import ConcurrencyContract
from .concurrency_keys import ConcurrencyKeysContract
from .dead_letter_pages import DeadLetterPagesContract
from .dead_letters import DeadLettersContract
from .delayed import DelayedContract
from .dependencies import DependenciesContract
from .duplicates import DuplicatesContract
from .enqueue import EnqueueContract
from .events import EventsContract
from .exporting import ExportContract
from .flow_graphs import FlowGraphsContract
from .flows import FlowsContract
from .headers import HeadersContract
from .ids_and_bytes import IdsAndBytesContract
from .incidents import IncidentsContract
from .insight import InsightContract
from .keeping import KeepingContract
from .kept_bytes import KeptBytesContract
from .leases import LeasesContract
from .limiters import LimitersContract
from .limits import LimitsContract
from .machine import ModelContract
from .maintenance import MaintenanceContract
from .moving import MovingContract
from .order import OrderContract
from .outcomes import OutcomesContract
from .pinned_bounds import PinnedBoundsContract
from .plans import PlansContract
from .queue_controls import QueueControlsContract
from .reads import ReadsContract
from .rejected import RejectedContract
from .replacing_payloads import ReplacingPayloadsContract
from .results import ResultsContract
from .retention import RetentionContract
from .snapshots import SnapshotsContract
from .staging import StagingContract
from .stalls import StallsContract
from .streaming import StreamingContract
from .subjects import SubjectsContract
from .transition_table import TransitionTableContract
from .unique_keys import UniqueKeysContract
from .updates import UpdatesContract
from .waiting import WaitingContract
from .workers import WorkersContract

__all__ = [
    "POLICIES",
    "BelongingsContract",
    "BulkWritesContract",
    "CancellingContract",
    "CapacityContract",
    "ClaimsContract",
    "ConcurrencyContract",
    "ConcurrencyKeysContract",
    "DeadLetterPagesContract",
    "DeadLettersContract",
    "DelayedContract",
    "DependenciesContract",
    "DuplicatesContract",
    "EnqueueContract",
    "EventsContract",
    "ExportContract",
    "FlowGraphsContract",
    "FlowsContract",
    "HeadersContract",
    "IdsAndBytesContract",
    "IncidentsContract",
    "InsightContract",
    "KeepingContract",
    "KeptBytesContract",
    "LeasesContract",
    "LimitersContract",
    "LimitsContract",
    "MaintenanceContract",
    "ModelContract",
    "MovingContract",
    "OrderContract",
    "OutcomesContract",
    "PinnedBoundsContract",
    "PlansContract",
    "QueueControlsContract",
    "ReadsContract",
    "RejectedContract",
    "ReplacingPayloadsContract",
    "ResultsContract",
    "RetentionContract",
    "SnapshotsContract",
    "StagingContract",
    "StallsContract",
    "StorageCase",
    "StorageContract",
    "StreamingContract",
    "SubjectsContract",
    "TransitionTableContract",
    "UniqueKeysContract",
    "UpdatesContract",
    "WaitingContract",
    "WorkersContract",
]


class StorageContract(
    EnqueueContract,
    OrderContract,
    ClaimsContract,
    LeasesContract,
    OutcomesContract,
    StallsContract,
    ResultsContract,
    CancellingContract,
    DeadLettersContract,
    DeadLetterPagesContract,
    RejectedContract,
    DelayedContract,
    UniqueKeysContract,
    DuplicatesContract,
    UpdatesContract,
    ReplacingPayloadsContract,
    CapacityContract,
    ConcurrencyKeysContract,
    LimitsContract,
    LimitersContract,
    DependenciesContract,
    MovingContract,
    FlowsContract,
    FlowGraphsContract,
    QueueControlsContract,
    ReadsContract,
    EventsContract,
    WaitingContract,
    StreamingContract,
    IncidentsContract,
    InsightContract,
    SubjectsContract,
    HeadersContract,
    WorkersContract,
    MaintenanceContract,
    RetentionContract,
    KeepingContract,
    KeptBytesContract,
    BelongingsContract,
    PinnedBoundsContract,
    IdsAndBytesContract,
    ModelContract,
    ConcurrencyContract,
    SnapshotsContract,
    TransitionTableContract,
):
    """All of it."""
