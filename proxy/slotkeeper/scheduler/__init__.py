"""The decisions: pure, synchronous, no clock, no sockets, no logging. Events in, effects out."""
