"""Spark: the session, and how errors come back from its tasks."""
