"""What changes over a run, as pure functions of how far the run is."""


def learning_rate(peak: float, *, progress: float, rise: float, final: float) -> float:
    """Linear rise, then linear fall.

        progress < rise:  peak * progress / rise
        otherwise:        from peak at `rise` to peak * final at progress 1

    Args:
        peak: the highest rate.
        progress: share of the run that is done, in [0, 1].
        rise: share of the run over which the rate rises, in [0, 1).
        final: the last rate, as a share of the peak, in [0, 1].

    Raises:
        ValueError: a share is outside its range.
    """
    if not 0.0 <= progress <= 1.0 or not 0.0 <= rise < 1.0 or not 0.0 <= final <= 1.0:
        raise ValueError(f"shares must lie in [0, 1], got progress={progress}, rise={rise}, final={final}")
    if progress < rise:
        return peak * progress / rise
    fallen = (progress - rise) / (1.0 - rise)
    return peak * (1.0 - (1.0 - final) * fallen)
