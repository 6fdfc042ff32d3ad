"""Plain values: ticks, positions, schemas, keys. Imports nothing of ours but the errors."""
