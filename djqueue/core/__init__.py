"""The queue itself: records, rules and the in-memory engine. Standard library only."""
