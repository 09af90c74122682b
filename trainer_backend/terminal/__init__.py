"""What a person sees in a terminal, and what the shell completes."""
