"""The materialization protocol: messages, their order, sessions and fences. No I/O, no clock, no chance."""
