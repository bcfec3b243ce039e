"""The in-memory engine."""

from .claimer import EXPIRED as EXPIRED
from .context import DEFAULT_POLICY as DEFAULT_POLICY
from .context import EngineContext as EngineContext
from .engine import NO_CLAIMS as NO_CLAIMS
from .engine import Engine as Engine
from .events import EngineEvents as EngineEvents
from .reads import EngineReads as EngineReads
from .workers import EngineWorkers as EngineWorkers
