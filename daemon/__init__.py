"""kvquota.daemon."""
