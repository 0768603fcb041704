"""Thin scripts that train with the engine, and the pieces they share. Shipped as `tokenspeed_rl.recipes`."""
