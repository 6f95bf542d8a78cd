"""Tools for testing code that uses weightdelta."""
