"""kvquotad: the daemon of one device. It holds the specs and hands each leader its segments."""
