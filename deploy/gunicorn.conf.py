"""Gunicorn for a project whose views enqueue jobs, and sometimes wait for one."""

import os

bind = f"0.0.0.0:{os.environ.get('PORT', '8000')}"
workers = int(os.environ.get("WEB_CONCURRENCY", "3"))
threads = 8  # a view that waits for a job occupies a thread
timeout = 60  # longer than the longest `wait` of enqueue_and_wait
graceful_timeout = 30
max_requests = 10_000
max_requests_jitter = 1_000
