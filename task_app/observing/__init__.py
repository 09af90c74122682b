"""What is counted, drawn and shown of what happens."""
