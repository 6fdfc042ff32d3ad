"""The small transactional store of timeline, frontiers, fences and the recovery log."""
