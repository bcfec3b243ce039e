"""The in-memory engine."""

from .claimer import EXPIRED as EXPIRED
from .engine import Engine as Engine
from .reads import EngineReads as EngineReads
from .settlement import EngineEvents as EngineEvents
from .workers import EngineWorkers as EngineWorkers
