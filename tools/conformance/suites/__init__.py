"""Files that the foreign suites load; they run in an environment of their own."""
