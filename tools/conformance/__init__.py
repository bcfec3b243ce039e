"""The test suites of Django, kombu and Celery, run with djqueue in the place of their own backends."""
