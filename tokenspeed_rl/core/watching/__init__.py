"""What is seen of an engine from outside, and what of it can be set: logs, dumps, profiles, a watchdog."""
