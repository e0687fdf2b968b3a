"""kvctl: the command line of kvquota. A gRPC client of one daemon, and nothing else."""
