"""For those who test what they build with djqueue.

plugin      pytest fixtures: `djqueue_memory`, `djqueue_drain` (loaded by pytest by itself)
assertions  `assert_enqueued`, `assert_not_enqueued`, and a mixin for unittest
clock       a clock that stands until it is moved
contract    the conformance suite, for a storage of one's own
factories   batches, claims and outcomes with defaults; jobs brought to each state
waiting     for what happens in other threads
"""
