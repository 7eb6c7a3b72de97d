"""Measurements that a user can repeat: `python -m sp_core bench ...`."""
