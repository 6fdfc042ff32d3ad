"""For authors of destinations and pipelines: what their tests need. Nothing in Tidegate imports it."""
