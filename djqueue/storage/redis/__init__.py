"""The storage on Redis or Valkey."""

from . import requirements as requirements  # isort: skip
from .storage import RedisStorage as RedisStorage
