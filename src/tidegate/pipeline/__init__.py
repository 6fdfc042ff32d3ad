"""The three jobs, ingest, derive and materialize, and the process that drives them."""
