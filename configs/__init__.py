"""Hydra's YAML files: groups and differences from the defaults, which live in the recipes' dataclasses."""
