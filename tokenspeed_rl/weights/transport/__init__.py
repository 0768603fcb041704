"""Weights from a trainer's process to engines in others: rendezvous, agreement, connections, framing."""
