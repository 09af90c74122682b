"""The HTTP routes, a small file for each topic. They translate HTTP for the code that decides."""
