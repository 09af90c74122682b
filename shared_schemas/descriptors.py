"""How many connections a service may hold: as many as its process may have files open, less what it needs."""

import resource


def connections_at_most(most: int) -> int:
    """`most`, or half of the descriptors that this process may have (`ulimit -n`), where that is less.

    The other half is for its own calls, files and database: without one a process can neither accept nor
    write, and ends.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))
