"""What stands before the routes: keys, bounds, deadlines, repeated requests."""
