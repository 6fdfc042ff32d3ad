"""From the source's changes to the log: Debezium's envelopes, sealing, the engine, recorded files, the log itself."""
