"""kvquota.kvctl."""
