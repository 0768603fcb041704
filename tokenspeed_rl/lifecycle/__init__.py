"""Control state of the engine as plain machines: what they act upon is injected, no tensor is in sight."""
