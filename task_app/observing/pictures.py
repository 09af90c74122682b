"""Pictures of an environment, for people: what can be drawn, PNG of a moment, animated GIF of an episode."""

import io
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from PIL import Image

_PALETTE_FROM = 8  # pictures: dawn to night, when an episode is that long
Picture = npt.NDArray[np.uint8]


@runtime_checkable
class Pictured(Protocol):
    """An `Environment` that can be drawn. Drawing changes nothing, and may take milliseconds."""

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """[height, width, 3] RGB picture of the episode as it is now."""


def png(picture: Picture) -> bytes:
    """[height, width, 3] RGB -> a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return file.getvalue()


def animated_gif(pictures: Sequence[Picture], *, frame_s: float) -> bytes:
    """Pictures of equal size, shown `frame_s` seconds each, again and again -> a GIF file.

    One palette for all, from a few of the pictures: a palette each would triple the file, and make things
    that stand still flicker.

    Raises:
        ValueError: there is no picture.
    """
    if not pictures:
        raise ValueError("an animated GIF needs at least one picture")
    few = np.concatenate(pictures[:: -(-len(pictures) // _PALETTE_FROM)])
    palette = Image.fromarray(few).quantize(256, dither=Image.Dither.NONE)
    frames = [
        Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures
    ]
    file = io.BytesIO()
    duration_ms = round(1_000 * frame_s)
    frames[0].save(
        file, "GIF", save_all=True, append_images=frames[1:], duration=duration_ms, loop=0, disposal=1
    )
    return file.getvalue()
