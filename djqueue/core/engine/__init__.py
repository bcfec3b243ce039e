"""The in-memory engine."""

from ..policies import DEFAULT_POLICY as DEFAULT_POLICY
from .claimer import EXPIRED as EXPIRED
from .context import EngineContext as EngineContext
from .engine import NO_CLAIMS as NO_CLAIMS
from .engine import Engine as Engine
from .reads import EngineReads as EngineReads
from .settlement import EngineEvents as EngineEvents
from .workers import EngineWorkers as EngineWorkers
