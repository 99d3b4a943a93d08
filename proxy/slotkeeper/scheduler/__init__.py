"""The decisions: pure, synchronous, no clock, no sockets, no logging. Events in, effects out.

Every event enters in `placement`. `candidates` finds the cheapest way to serve a prompt, `prices` and `rates`
say what each costs, `idle_work` what to do while nobody waits.
"""
