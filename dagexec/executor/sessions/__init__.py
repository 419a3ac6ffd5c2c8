"""Sessions: runs of an executor that follow one another, with states and caches between them."""
