"""Tools for testing projects that use djqueue.

plugin      pytest fixtures: `djqueue_memory`, `djqueue_drain` (loaded automatically by pytest)
assertions  `assert_enqueued`, `assert_not_enqueued`, and a mixin for unittest
clock       a clock that only tests move
contract    the conformance suite for storages
factories   batches, claims and outcomes with defaults; jobs in each state
waiting     wait for events in other threads
"""
