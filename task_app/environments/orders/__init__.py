"""A shop's desk: the model carries out the requests of customers by tools that change a small database."""
