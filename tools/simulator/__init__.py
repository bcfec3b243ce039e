"""A deterministic simulation of the database storage, its scheduler and its workers.

Real code runs on one event loop with simulated time: the engine, the journal, recovery, the scheduler's
lease, the client, and the workers' claim loop and heartbeat. The sockets, threads and clocks below them are
simulated, and so are their faults. Every choice comes from one seeded `Random`.
"""
