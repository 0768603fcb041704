"""From prompts to scored trajectories, advantages, and losses that add up however they are split."""
