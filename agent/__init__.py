"""kvquota.agent."""
