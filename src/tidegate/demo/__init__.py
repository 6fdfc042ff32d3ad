"""The demo: a shop, the pipeline behind it, and a reader who counts what should never be seen."""
