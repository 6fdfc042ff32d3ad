"""Keyed rows with history: how a collection's updates are written, read at a tick, and merged."""
