"""Tidegate follows a database's transactions and delivers SQL views over them, whole and exactly once."""

__version__ = "0.1.0"
