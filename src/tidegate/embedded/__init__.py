"""Real servers out of PyPI packages, for the demo and the tests."""
