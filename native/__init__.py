"""Native memory."""
