"""kvquota.v1."""
