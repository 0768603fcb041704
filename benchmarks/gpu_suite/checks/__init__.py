"""What the section `correct` checks, a file for each kind of op."""
