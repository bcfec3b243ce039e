"""Connections to other systems; each needs an extra."""
