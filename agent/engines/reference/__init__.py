"""A small real engine: the worked example of an adapter, and the engine of the tests and the demo."""
