"""The loop that owns the model: what runs next, one forward, one draw, and what came of it."""
