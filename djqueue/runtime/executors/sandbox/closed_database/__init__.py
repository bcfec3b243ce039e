"""Database backend of the databases that a job must not use: whatever is done raises PermissionError."""
