"""Ticks, what each of them reads, and how far everything is. Pure."""
