"""The number of connections that a service can hold, from the number of files that its process may open."""

import resource


def connections_at_most(most: int) -> int:
    """The smaller of `most` and half of the process's descriptors (`ulimit -n`).

    The other half is for its own calls, files and database; without a descriptor a process can neither accept
    nor write.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))
