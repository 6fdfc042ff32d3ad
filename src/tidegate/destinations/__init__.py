"""Outside systems into which collections are delivered, all of one shape."""
