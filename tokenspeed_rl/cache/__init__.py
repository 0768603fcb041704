"""Where keys and values live: pages (plain Python), their tensors, and the prefixes worth keeping."""
