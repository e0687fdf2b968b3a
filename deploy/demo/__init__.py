"""make demo."""
